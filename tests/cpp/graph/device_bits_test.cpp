// SPDX-License-Identifier: Apache-2.0
// Which operators on a device a CPU may stand for: forms, tables, and what is in none.
#include "graph/device_bits.h"

#include <gtest/gtest.h>

#include "graph/ir_text.h"

namespace penstock::graph {
namespace {

Graph graph_of(const std::string& statement) {
  auto parsed = parse_graph(
      "penstock-ir 1\ninput %x leaf 0 uint8 [4]\ninput %y leaf 1 float32 [4]\n"
      "input %n int \"size\" = %x.size(0)\n" +
      statement + "\n");
  EXPECT_TRUE(parsed) << parsed.error().message;
  return parsed ? std::move(parsed).value() : Graph{};
}

std::string form_of(const std::string& statement) { return bits_form(graph_of(statement).nodes.at(0)); }
std::string why(const std::string& statement) { return bit_difference_reason(graph_of(statement).nodes.at(0)); }

TEST(DeviceBits, AFormHasKindsOfArgumentsAndNoValues) {
  EXPECT_EQ(form_of("%v = aten::add.Tensor(%x, %y, alpha=2) on cuda:0 [uint8, float32]"),
            "add.Tensor(uint8,float32,alpha=i)");
  EXPECT_EQ(form_of("%v = aten::f(%x, 1.5, none, true, \"mean\", [1, 2], [1, 1.5], []) on cuda:0 [uint8]"),
            "f(uint8,f,none,true,str,[i...],[i,f],[])");
  EXPECT_EQ(form_of("%v = aten::cat([%x, %x], %n) on cuda:0 [uint8, uint8, int]"), "cat([uint8...],i)");
  EXPECT_EQ(form_of("%v = aten::_to_copy(%x, dtype=dtype:float32, layout=none) on cuda:0 [cpu uint8]"),
            "_to_copy(uint8,dtype=float32)");
}

TEST(DeviceBits, WhatWasMeasuredAsEqualMayMoveAndAllElseStays) {
  EXPECT_EQ(why("%v = aten::mul.Tensor(%y, %y) on cuda:0 [float32, float32]"), "");
  EXPECT_NE(why("%v = aten::exp(%y) on cuda:1 [float32]").find("has different last bits on cuda:1"), std::string::npos);
  EXPECT_NE(why("%v = aten::digamma(%y) on cuda:0 [float32]").find("is not known"), std::string::npos);
  EXPECT_NE(why("%v = aten::mul.Tensor(%y, %y) on tpu:0 [float32, float32]").find("is not known"), std::string::npos);
}

TEST(DeviceBits, CopiesToADeviceMoveAndOperatorsOnTensorsOfBothSidesStay) {
  EXPECT_EQ(why("%v = aten::alias(%x) on cuda:0 [cpu uint8]"), "");
  EXPECT_EQ(why("%v = aten::_to_copy(%x, dtype=dtype:float32) on cuda:0 [cpu uint8]"), "");
  EXPECT_NE(why("%v = aten::mul.Tensor(%y, %y) on cuda:0 [float32, cpu float32]").find("together"), std::string::npos);
}

TEST(DeviceBits, ADivisionByANumberIsAProductWithItsReciprocalWhereATableSaysSo) {
  Graph graph = graph_of(
      "%v = aten::div.Scalar(%x, 255) on cuda:0 [uint8]\n%w = aten::div.Scalar(%y, 3.0)\n"
      "%u = aten::div.Scalar(%y, 3) on cuda:0 [float16]");
  put_equal_twins(graph);
  EXPECT_EQ(graph.nodes[0].op, "aten::mul.Scalar");
  EXPECT_EQ(*graph.nodes[0].args[1].get<Real>(), Real(static_cast<double>(1.0F / 255.0F)));
  EXPECT_EQ(bit_difference_reason(graph.nodes[0]), "");
  EXPECT_EQ(graph.nodes[1].op, "aten::div.Scalar") << "the trainer's CPU divides";
  EXPECT_EQ(graph.nodes[2].op, "aten::div.Scalar") << "nobody has measured halves";
}

TEST(DeviceBits, ATableThatIsAddedCountsForItsDeviceAndDifferencesWin) {
  ASSERT_TRUE(add_device_bits("penstock-device-bits 1\ndevice other\nequal digamma(T) float32 float64\nequal f(T)\n"));
  EXPECT_EQ(why("%v = aten::digamma(%y) on other:0 [float32]"), "");
  EXPECT_NE(why("%v = aten::digamma(%y) on cuda:0 [float32]"), "");
  ASSERT_TRUE(add_device_bits("penstock-device-bits 1\ndevice other\ndiffers digamma(T) float32\n"));
  EXPECT_NE(why("%v = aten::digamma(%y) on other:0 [float32]").find("has different last bits"), std::string::npos);
}

TEST(DeviceBits, OperatorsThatRoundJump) {
  for (const std::string_view call :
       {"aten::floor(%y)", "aten::remainder.Scalar(%y, 2)", "aten::div.Tensor_mode(%y, %y, rounding_mode=\"trunc\")"})
    EXPECT_TRUE(jumps(graph_of("%v = " + std::string(call)).nodes[0])) << call;
  for (const std::string_view call : {"aten::exp(%y)", "aten::div.Tensor(%y, %y)", "other::floor(%y)"})
    EXPECT_FALSE(jumps(graph_of("%v = " + std::string(call)).nodes[0])) << call;
}

TEST(DeviceBits, WhatIsNoTableIsRefusedWithItsLine) {
  for (const std::string_view text :
       {"", "equal exp(T) float32", "penstock-device-bits 2\ndevice a\n", "penstock-device-bits 1\n",
        "penstock-device-bits 1\ndevice a\nequal exp float32\n",
        "penstock-device-bits 1\ndevice a\nequal exp(T) floaty\n",
        "penstock-device-bits 1\ndevice a\nperhaps exp(T) float32\n", "penstock-device-bits 1\ndevice\n"}) {
    const auto added = add_device_bits(text);
    ASSERT_FALSE(added) << text;
    EXPECT_EQ(added.error().code, Errc::kMalformed);
  }
  const auto added = add_device_bits("penstock-device-bits 1\ndevice a\nequal exp float32\n");
  EXPECT_NE(added.error().message.find("line 3"), std::string::npos) << added.error().message;
}

TEST(DeviceBits, TheTablesThatPenstockComesWithNameTheirDevicesAndWhatTheyWereMeasuredOn) {
  for (const std::string_view table : device_bits_tables()) {
    EXPECT_NE(table.find("\ndevice "), std::string_view::npos);
    EXPECT_NE(table.find("\nmeasured \""), std::string_view::npos);
  }
}

}  // namespace
}  // namespace penstock::graph
