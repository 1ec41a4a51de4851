// SPDX-License-Identifier: Apache-2.0
// The IR's text: exact round trips, and an error for everything else.

#include "graph/ir_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace penstock::graph {
namespace {

constexpr std::string_view kProgram = R"(penstock-ir 1
input %x0 leaf 0 uint8 [s0, 3, 256, 256]
input %x1 leaf 3 int64 []
input %c0 const "L['self'].mean" float32 [1, 3, 1, 1] digest "0123456789abcdef0123456789abcdef"
input %p0 state "L['self'].conv.weight" float32 [64, 3, 7, 7]
input %s0 int "size of %x0 dim 0" = %x0.size(0)
input %s1 int "someone's number"
%v1 = aten::to.dtype(%x0, dtype:float32, false, copy=false, memory_format=none) group 0 "x.float() at \"model.py\":12"
%v2 = aten::sub.Tensor(%v1, %c0, alpha=1.5) at "my \"model\".py:13"
%v3, %v4 = aten::max.dim(%v2, -1, true) group 7 "tab\tline\nback\\slash \x00\xff" at "model.py:14"
%v5 = aten::cat([%v1, %v2, [none, [1, -0.0, inf, -inf, nan, 1e-05]]], 1)
%v6 = aten::full([%s0, 3], 1e+300, dtype=dtype:int64, layout=layout:strided, device=device:cuda:1, pin_memory=false)
%v7 = aten::contiguous(%v6, memory_format=memory_format:channels_last)
%v8 = size::add(%s0, -9223372036854775808)
%v10 = aten::alias(%x0) on cuda:0 [cpu uint8] group 9 "x.to"
%v11 = aten::index(%v10, %s0, [%v10, %x1]) on simulated [uint8, int, uint8, cpu int64] at "model.py:15"
aten::_assert_async(%v7)
%v9 = aten::fill("text", device:cpu, [])
output %v2 key "ffffffffffffffffffffffffffffffff"
output %v9
)";

Graph parsed(std::string_view text) {
  auto graph = parse_graph(text);
  EXPECT_TRUE(graph) << graph.error().message;
  return graph ? std::move(graph).value() : Graph{};
}

std::string error_of(std::string_view text) {
  const auto graph = parse_graph(text);
  return graph ? "parsed" : graph.error().message;
}

std::string program_with(std::string_view statement) {
  return "penstock-ir 1\ninput %x leaf 0 float32 [2]\n" + std::string(statement) + "\n";
}

TEST(IrText, CanonicalTextPrintsAsItWasRead) { EXPECT_EQ(print_graph(parsed(kProgram)), kProgram); }

TEST(IrText, PrintedGraphsParseToEqualGraphs) {
  const Graph graph = parsed(kProgram);
  EXPECT_EQ(parsed(print_graph(graph)), graph);
}

TEST(IrText, ANodeOnADeviceHasADtypeForEachOperand) {
  EXPECT_NE(error_of(program_with("%y = aten::add(%x, %x) on cuda:0 [float32]")).find("2 operands"), std::string::npos);
  EXPECT_NE(error_of(program_with("%y = aten::neg(%x) on cuda:0 [double]")).find("a dtype"), std::string::npos);
  EXPECT_NE(error_of(program_with("%y = aten::neg(%x) on cuda:999 [float32]")), "parsed");
  EXPECT_NE(error_of(program_with("%y = aten::neg(%x) on cuda:0")), "parsed");
}

TEST(IrText, BlanksAndEmptyLinesChangeNothing) {
  EXPECT_EQ(parsed("penstock-ir   1\n\n  input  %x   leaf 0 float32 [ 2 ]\n   %y=aten::neg( %x )\n\noutput %y"),
            parsed("penstock-ir 1\ninput %x leaf 0 float32 [2]\n%y = aten::neg(%x)\noutput %y\n"));
}

TEST(IrText, EveryFloatReadsBackToTheSameBits) {
  std::mt19937_64 random(20240607);
  for (int i = 0; i < 20'000; ++i) {
    const double value = std::bit_cast<double>(random());
    Graph graph = parsed(program_with("%y = aten::add.Scalar(%x, 0.5)"));
    graph.nodes[0].args[1] = Argument{Real(value)};
    const Graph again = parsed(print_graph(graph));
    ASSERT_EQ(again, graph) << "seed 20240607, " << value;
  }
}

TEST(IrText, FloatsOfIntegralValueStayFloats) {
  const Graph graph = parsed(program_with("%y = aten::add.Scalar(%x, 3.0)"));
  EXPECT_NE(print_graph(graph).find("3.0"), std::string::npos);
  EXPECT_NE(graph.nodes[0].args[1].get<Real>(), nullptr);
}

TEST(IrText, ZeroAndMinusZeroAreTwoLiterals) {
  EXPECT_NE(parsed(program_with("%y = aten::add.Scalar(%x, 0.0)")),
            parsed(program_with("%y = aten::add.Scalar(%x, -0.0)")));
}

// Whatever the result, nothing may crash, and a text that parses must print and parse to itself.
void expect_graph_or_error(const std::string& text) {
  const auto graph = parse_graph(text);
  if (!graph) {
    EXPECT_NE(graph.error().message.find("line "), std::string::npos) << graph.error().message;
    return;
  }
  const auto again = parse_graph(print_graph(graph.value()));
  ASSERT_TRUE(again) << text << "\n" << again.error().message;
  EXPECT_EQ(again.value(), graph.value()) << text;
}

TEST(IrText, EveryTruncationIsAGraphOrAnError) {
  for (size_t size = 0; size < kProgram.size(); ++size) expect_graph_or_error(std::string(kProgram.substr(0, size)));
}

TEST(IrText, EveryDeletionOfACharacterIsAGraphOrAnError) {
  for (size_t i = 0; i < kProgram.size(); ++i) {
    std::string text(kProgram);
    text.erase(i, 1);
    expect_graph_or_error(text);
  }
}

TEST(IrText, EveryReplacedCharacterIsAGraphOrAnError) {
  for (size_t i = 0; i < kProgram.size(); ++i)
    for (const char c : {'\0', '%', '"', '[', ']', '(', ',', '=', '-', '.', ':', '0', '9', 'e', '\n', '\\', '\x80'}) {
      std::string text(kProgram);
      text[i] = c;
      expect_graph_or_error(text);
    }
}

TEST(IrText, RandomBytesAreAGraphOrAnError) {
  std::mt19937 random(7);
  for (int i = 0; i < 2'000; ++i) {
    std::string text = i % 2 == 0 ? "penstock-ir 1\n" : "";
    const size_t size = random() % 200;
    for (size_t j = 0; j < size; ++j) text += static_cast<char>(random() % 256);
    expect_graph_or_error(text);
  }
}

TEST(IrText, ErrorsHaveLineAndColumn) {
  EXPECT_NE(error_of("penstock-ir 1\ninput %x leaf 0 float31 [2]\n").find("line 2, column 24"), std::string::npos)
      << error_of("penstock-ir 1\ninput %x leaf 0 float31 [2]\n");
}

struct Malformed {
  const char* name;
  const char* statement;
};

class IrTextMalformed : public testing::TestWithParam<Malformed> {};

TEST_P(IrTextMalformed, IsRefused) {
  const auto graph = parse_graph(program_with(GetParam().statement));
  ASSERT_FALSE(graph);
  EXPECT_EQ(graph.error().code, Errc::kMalformed) << graph.error().message;
}

INSTANTIATE_TEST_SUITE_P(
    Statements, IrTextMalformed,
    testing::Values(Malformed{"undefined_value", "%y = aten::neg(%z)"}, Malformed{"own_result", "%y = aten::neg(%y)"},
                    Malformed{"name_taken", "%x = aten::neg(%x)"},
                    Malformed{"result_twice", "%y, %y = aten::max.dim(%x, 0)"},
                    Malformed{"leaf_twice", "input %y leaf 0 float32 [2]"},
                    Malformed{"input_after_node", "%y = aten::neg(%x)\ninput %z leaf 1 float32 []"},
                    Malformed{"node_after_output", "output %x\n%y = aten::neg(%x)"},
                    Malformed{"positional_after_keyword", "%y = aten::add(alpha=1, %x)"},
                    Malformed{"keyword_twice", "%y = aten::add(a=1, a=2)"}, Malformed{"no_namespace", "%y = neg(%x)"},
                    Malformed{"unknown_dtype", "%y = aten::to(%x, dtype:float31)"},
                    Malformed{"integer_too_large", "%y = aten::add(%x, 9223372036854775808)"},
                    Malformed{"float_too_large", "%y = aten::add(%x, 1e999)"},
                    Malformed{"infinity_word", "%y = aten::add(%x, infinity)"},
                    Malformed{"unknown_word", "%y = aten::add(%x, maybe)"},
                    Malformed{"raw_control_character", "%y = aten::add(%x, \"a\tb\")"},
                    Malformed{"upper_case_escape", "%y = aten::add(%x, \"\\xFF\")"},
                    Malformed{"unclosed_text", "%y = aten::add(%x, \"abc)"},
                    Malformed{"symbol_in_constant", "input %c const \"c\" float32 [s0]"},
                    Malformed{"negative_size", "input %c const \"c\" float32 [-1]"},
                    Malformed{"short_digest", "input %c const \"c\" float32 [1] digest \"00\""},
                    Malformed{"size_of_constant", "input %c const \"c\" float32 [1]\ninput %s int \"s\" = %c.size(0)"},
                    Malformed{"size_of_missing_dim", "input %s int \"s\" = %x.size(1)"},
                    Malformed{"trailing_text", "%y = aten::neg(%x) grouped"},
                    Malformed{"place_without_text", "%y = aten::neg(%x) at"},
                    Malformed{"empty_place", "%y = aten::neg(%x) at \"\""},
                    Malformed{"place_before_group", "%y = aten::neg(%x) at \"m.py:1\" group 0 \"\""},
                    Malformed{"comment", "output %x # a comment"}),
    [](const auto& info) { return info.param.name; });

TEST(IrText, LengthsPastTheirCapsAreTooLarge) {
  const std::string long_text(kQuotedBytesMax + 1, 'a');
  std::string long_list = "1";
  for (size_t i = 0; i < kListItemsMax; ++i) long_list += ",1";
  std::string many_arguments = "1";
  for (size_t i = 0; i < kArgumentsMax; ++i) many_arguments += ",1";
  for (const std::string& statement :
       {"%y = aten::add(\"" + long_text + "\")", "%y = aten::add([" + long_list + "])",
        "%y = aten::add(" + many_arguments + ")", std::string("%y = aten::add([[[[[1]]]]])")}) {
    const auto graph = parse_graph(program_with(statement));
    ASSERT_FALSE(graph) << statement.substr(0, 40);
    EXPECT_EQ(graph.error().code, Errc::kTooLarge) << graph.error().message;
  }
  EXPECT_EQ(parse_graph(std::string(kTextBytesMax + 1, '\n')).error().code, Errc::kTooLarge);
  EXPECT_FALSE(parse_graph(program_with("%" + std::string(kNameBytesMax + 1, 'a') + " = aten::neg(%x)")));
}

TEST(IrText, TextsAtTheirCapsParse) {
  EXPECT_TRUE(parse_graph(program_with("%y = aten::add(\"" + std::string(kQuotedBytesMax, 'a') + "\")")));
  EXPECT_TRUE(parse_graph(program_with("%y = aten::add([[[[1]]]])")));
  EXPECT_TRUE(parse_graph(program_with("%" + std::string(kNameBytesMax, 'a') + " = aten::neg(%x)")));
}

}  // namespace
}  // namespace penstock::graph
