// SPDX-License-Identifier: Apache-2.0
// Effects of hand-written graphs, with the traits that torch's dispatcher gives.

#include "graph/effects.h"

#include <gtest/gtest.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "capture/capture.h"
#include "graph/ir_text.h"

TORCH_LIBRARY(penstock_test, library) {
  library.def("copied(Tensor x) -> Tensor", [](const at::Tensor& x) { return x.clone(); });
}

namespace penstock::capture {
namespace {

class Effects : public testing::Test {
 protected:
  void load(std::string_view statements, graph::EffectOptions options = {}) {
    auto parsed = graph::parse_graph(
        "penstock-ir 1\n"
        "input %x leaf 0 float32 [s0, 4]\n"
        "input %c const \"self.mean\" float32 [4]\n"
        "input %p state \"self.weight\" float32 [4, 4]\n"
        "input %n int \"size\" = %x.size(0)\n"
        "input %k int \"a counter\"\n" +
        std::string(statements));
    ASSERT_TRUE(parsed) << parsed.error().message;
    graph_ = std::move(parsed).value();
    annotate(graph_);
    verdicts_ = graph::analyse_effects(graph_, options);
  }

  // Of the node that makes the value.
  const graph::Verdict& of(std::string_view value) const {
    for (size_t i = 0; i < graph_.nodes.size(); ++i)
      for (const graph::ValueId result : graph_.nodes[i].results)
        if (graph_.value_names[result] == value) return verdicts_[i];
    ADD_FAILURE() << "no node makes " << value;
    return verdicts_.front();
  }

  void expect(std::string_view value, graph::Level level, bool movable) {
    EXPECT_EQ(graph::name_of(of(value).level), graph::name_of(level)) << value << ": " << of(value).reason;
    EXPECT_EQ(of(value).movable, movable) << value << ": " << of(value).reason;
  }

  void expect_stays(std::string_view value, std::string_view cause) {
    expect(value, graph::Level::kState, false);
    EXPECT_NE(of(value).reason.find(cause), std::string::npos) << of(value).reason;
  }

  void expect_moves(std::string_view value) {
    expect(value, graph::Level::kStateless, true);
    EXPECT_FALSE(graph::must_stay(of(value))) << value << ": " << of(value).reason;
  }
  // A worker could run it, and the trainer does.
  void expect_second_view(std::string_view value, graph::Level level = graph::Level::kStateless) {
    expect(value, level, true);
    EXPECT_TRUE(graph::must_stay(of(value))) << value << ": " << of(value).reason;
    EXPECT_NE(of(value).reason.find("returns a second view of memory that leaves forward"), std::string::npos);
  }

  graph::Graph graph_;
  std::vector<graph::Verdict> verdicts_;
};

TEST_F(Effects, OperatorsOfOtherLibrariesStayUnlessTheyAreDeclared) {
  load(R"(
%b = declared::penstock_test::copied(%x)
%c1 = aten::cos(%b)
%d = declared::penstock_test::missing(%x)
%e = declared::penstock_test::copied(%p)
%a = penstock_test::copied(%x)
output %c1
)");
  expect_stays("a", "declare it with penstock.stateless");
  expect("b", graph::Level::kStateless, true);
  expect("c1", graph::Level::kStateless, true);
  expect_stays("d", "is not an operator of this version of torch");
  expect("e", graph::Level::kState, false);
}

TEST_F(Effects, LevelsJoinOverOperands) {
  load(R"(
%a = aten::mul.Tensor(%c, %c)
%b = aten::arange(%n)
%d = aten::add.Tensor(%a, %b)
%e = aten::sub.Tensor(%x, %a)
%f = aten::mm(%e, %p)
%g = aten::relu(%f))");
  expect("a", graph::Level::kConst, true);
  expect("b", graph::Level::kShape, true);
  expect("d", graph::Level::kShape, true);
  expect("e", graph::Level::kStateless, true);
  EXPECT_EQ(of("f").reason, "aten::mm reads self.weight, a parameter or state of the model");
  EXPECT_EQ(of("g").reason,
            "it depends on a value that stays: aten::mm reads self.weight, a parameter or state of the model");
  expect("f", graph::Level::kState, false);
  expect("g", graph::Level::kState, false);
}

TEST_F(Effects, SizesOfALeafAreShapeAndSizesOfAComputedValueAreAsTheValue) {
  load(R"(
%a = aten::sym_size.int(%x, 0)
%b = size::mul(%a, 2)
%d = aten::neg(%x)
%e = aten::sym_size.int(%d, 0)
%f = aten::mm(%x, %p)
%g = size::rank(%f))");
  expect("a", graph::Level::kShape, true);
  expect("b", graph::Level::kShape, true);
  expect("e", graph::Level::kStateless, true);
  expect("g", graph::Level::kState, false);
}

TEST_F(Effects, NumbersFromOutsideTheBatchStay) {
  load("%a = aten::add.Scalar(%x, %k)");
  expect_stays("a", "reads a counter, a number from outside the batch");
}

TEST_F(Effects, ASecondViewOfMemoryThatLeavesForwardStays) {
  load(R"(
%a = aten::neg(%x)
%b = aten::view(%a, [-1])
%d = aten::select.int(%b, 0, 0)
output %a
output %d
)");
  expect_moves("a");
  expect_second_view("b");
  expect_second_view("d");
}

TEST_F(Effects, AViewOfAnInputThatLeavesForwardStays) {
  load(R"(
%a = aten::view(%x, [-1])
%b = aten::neg(%a)
%d = aten::view(%c, [2, 2])
output %a
output %b
)");
  expect_second_view("a");
  expect("d", graph::Level::kConst, true);
}

TEST_F(Effects, AViewOfAConstantThatLeavesForwardIsMadeOnBothSides) {
  load("%a = aten::view(%c, [2, 2])\n%b = aten::neg(%a)\noutput %a\noutput %b\n");
  expect_second_view("a", graph::Level::kConst);
  EXPECT_TRUE(graph::is_replicable(of("a")));
}

TEST_F(Effects, ViewsOfMemoryOfWhichTheUserHasOneValueMayMove) {
  load(R"(
%a = aten::neg(%x)
%b = aten::view(%a, [-1])
%d = aten::exp(%a)
output %b
output %d
)");
  for (const char* value : {"a", "b", "d"}) expect_moves(value);
}

TEST_F(Effects, PartsOfOneListThatLeaveForwardStayTogether) {
  load(R"(
%a = aten::neg(%x)
%l = aten::split.Tensor(%a, 2, 1)
%b = list::get(%l, 0)
%d = list::get(%l, 1)
output %b
output %d
)");
  expect_moves("a");
  for (const char* value : {"l", "b", "d"}) expect_second_view(value);
}

TEST_F(Effects, WhatIsBetweenTheOperatorsOfOneCallIsNobodysView) {
  load(R"(
%a = aten::neg(%x) group 0 "normalize"
%b = aten::view(%a, [-1]) group 0 "normalize"
%d = aten::view(%b, [4, -1]) group 1 "view"
output %b
output %d
)");
  expect_moves("a");
  expect_moves("b");
  expect_second_view("d");
}

TEST_F(Effects, WhatIsKnownOutsideIsLikeAnInput) {
  const std::string program = "%a = aten::neg(%x)\n%b = aten::view(%a, [-1])\noutput %b\n";
  load(program);
  expect_moves("b");
  load(program, {.known_outside = {5}});  // %a, after five inputs
  expect_moves("a");
  expect_second_view("b");
}

// Composite operators may hand an operand back, as far as their schemas go: what was returned of one stayed.
TEST_F(Effects, ValuesThatWereSeenInMemoryOfTheirOwnAreNoViews) {
  const std::string program = "%a = aten::linalg_svdvals(%x)\n%b = aten::neg(%x)\noutput %a\noutput %b\n";
  load(program);
  expect_second_view("a");
  std::vector<std::optional<int64_t>> memory(7);
  memory[0] = 1;  // %x
  memory[5] = 2;  // %a, after five inputs
  load(program, {.memory = memory});
  expect_moves("a");
  memory[5] = 1;
  load(program, {.memory = memory});
  expect_second_view("a");
}

TEST_F(Effects, TheResultsOfAPrefixMayShareMemory) {
  load("%a = aten::neg(%x)\n%b = aten::view(%a, [-1])\noutput %a\noutput %b\n", {.is_whole_program = false});
  for (const char* value : {"a", "b"}) expect_moves(value);
}

TEST_F(Effects, UnknownOperatorsStayWhateverTheyLookLike) {
  load(R"(
%a = mylib::pure_function(%x)
%b = aten::no_such_operator(%x)
%d = aten::add.NoSuchOverload(%x, %x)
%e = aten::neg(%x, %x)
%f = aten::neg()
%g, %h = aten::neg(%x)
%i = size::add(%n)
%j = torchvision::nms(%x, %x, 0.5))");
  for (const char* value : {"a", "b", "d", "e", "f", "g", "i", "j"}) expect(value, graph::Level::kState, false);
}

TEST_F(Effects, GraphsWithoutTraitsStay) {
  load("%a = aten::neg(%x)");
  graph_.traits.clear();
  EXPECT_FALSE(graph::analyse_effects(graph_, {})[0].movable);
}

TEST_F(Effects, WriteToAViewPinsTheBaseAndWhatWasReadBeforeIt) {
  load(R"(
%a = aten::neg(%x)
%b = aten::relu(%a)
%v = aten::view(%a, [-1])
%d = aten::exp(%b)
%w = aten::mul_.Scalar(%v, 2))");
  expect_stays("a", "aten::mul_.Scalar writes it in place");
  expect_stays("b", "aten::mul_.Scalar writes it in place");
  expect_stays("v", "aten::mul_.Scalar writes it in place");
  expect_stays("d", "aten::mul_.Scalar writes it in place");
  expect("w", graph::Level::kState, false);
}

TEST_F(Effects, WriteToALeafPinsItsReaders) {
  load(R"(
%a = aten::neg(%x)
%w = aten::add_.Scalar(%x, 1))");
  expect_stays("a", "writes it in place");
}

TEST_F(Effects, WriteToOtherMemoryPinsNothingElse) {
  load(R"(
%a = aten::neg(%x)
%b = aten::exp(%x)
%w = aten::add_.Scalar(%a, 1))");
  expect("b", graph::Level::kStateless, true);
}

TEST_F(Effects, SplitsOfOneTensorShareItsMemory) {
  load(R"(
%a = aten::neg(%x)
%l = aten::split.Tensor(%a, 2, 1)
%b = list::get(%l, 0)
%d = list::get(%l, 1)
%w = aten::zero_(%d))");
  expect_stays("a", "aten::zero_ writes it in place");
  expect_stays("b", "aten::zero_ writes it in place");
}

TEST_F(Effects, CompositeThatMayHandBackItsOperandSharesItsMemory) {
  load(R"(
%a = aten::neg(%x)
%b = aten::type_as(%a, %x)
%w = aten::zero_(%b))");
  expect_stays("a", "aten::zero_ writes it in place");
}

TEST_F(Effects, InPlaceReluAfterAConvolutionPinsOnlyTheConvolution) {
  load(R"(
%a = aten::unsqueeze(%x, 0)
%b = aten::unsqueeze(%a, 0)
%d = aten::conv2d(%b, %p)
%w = aten::relu_(%d))");
  expect("a", graph::Level::kStateless, true);
  expect("b", graph::Level::kStateless, true);
}

TEST_F(Effects, UnknownOperatorSpoilsItsOperandForWhatComesAfterItAlone) {
  load(R"(
%a = aten::neg(%x)
%b = aten::exp(%a)
%u = mylib::mystery(%a)
%d = aten::relu(%a)
%e = aten::relu(%x))");
  expect("a", graph::Level::kStateless, true);
  expect("b", graph::Level::kStateless, true);
  expect_stays("d", "mylib::mystery, whose effect is not known, may have written it");
  expect("e", graph::Level::kStateless, true);
}

TEST_F(Effects, UnknownOperatorPinsMemoryThatIsReadByAnotherNameLater) {
  // Both %a and its view would be shipped as two tensors, and a write to one would not be seen in the other.
  load(R"(
%a = aten::neg(%x)
%v = aten::view(%a, [-1])
%u = mylib::mystery(%a)
%d = mylib::reader(%v))");
  expect_stays("a", "mylib::mystery");
  expect_stays("v", "mylib::mystery");
}

TEST_F(Effects, UnknownOperatorOfTwoValuesDoesNotTieThemTogether) {
  load(R"(
%a = aten::neg(%x)
%b = aten::exp(%x)
%u = mylib::mystery(%a, %b))");
  expect("a", graph::Level::kStateless, true);
  expect("b", graph::Level::kStateless, true);
}

TEST_F(Effects, WriteToAnUnknownResultPinsWhatItMayBe) {
  load(R"(
%a = aten::neg(%x)
%u = mylib::mystery(%a)
%w = aten::zero_(%u))");
  expect_stays("a", "aten::zero_ writes it in place");
}

TEST_F(Effects, OpaqueOperatorStaysAndSpoilsNothing) {
  load(R"(
%a = aten::neg(%x)
%u = opaque::conv2d(%a)
%w = aten::relu_(%u)
%d = aten::exp(%a))");
  expect_stays("u", "opaque::conv2d has no known effect");
  expect("a", graph::Level::kStateless, true);
  expect("d", graph::Level::kStateless, true);
}

TEST_F(Effects, OpaqueViewSharesMemoryWithItsOperand) {
  load(R"(
%a = aten::neg(%x)
%u = opaque_view::reshape(%a)
%w = aten::relu_(%u))");
  expect_stays("a", "aten::relu_ writes it in place");
}

TEST_F(Effects, RandomOperatorsStayUnlessAllowed) {
  constexpr std::string_view kDraws = R"(
%a = aten::dropout(%x, 0.5, true)
%b = aten::bernoulli(%x)
%d = aten::rand([%n, 4])
%e = aten::add.Tensor(%b, %x)
%f = aten::scaled_dot_product_attention(%x, %x, %x, none, 0.1)
%g = aten::normal.float_float(0.0, 1.0, [2])
%h = aten::rrelu(%x, 0.1, 0.3, true)
%i = aten::multinomial(%x, 1)
%j = aten::poisson(%x)
%k1, %k2 = aten::native_dropout(%x, 0.5, true))";
  load(kDraws);
  for (const char* value : {"a", "b", "d", "e", "f", "g", "h", "i", "j", "k1"})
    expect(value, graph::Level::kRandom, false);
  EXPECT_EQ(of("e").reason, "it depends on a value that stays: aten::bernoulli draws random numbers");
  load(kDraws, {.allow_random = true});
  for (const char* value : {"a", "b", "d", "e", "f", "g", "h", "i", "j", "k1"})
    expect(value, graph::Level::kRandom, true);
}

// On a device: an exponential and what follows from it.
constexpr std::string_view kOnDevice = R"(
%d = aten::alias(%x) on cuda:0 [cpu float32]
%e = aten::exp(%d) on cuda:0 [float32]
%f = aten::mul.Tensor(%e, %e) on cuda:0 [float32, float32]
%g = aten::floor(%f) on cuda:0 [float32]
%h = aten::gt.Scalar(%e, 1.5) on cuda:0 [float32]
%i = aten::argmax(%e) on cuda:0 [float32]
%j = aten::div.Tensor_mode(%e, %d, rounding_mode="floor") on cuda:0 [float32, float32]
%n2 = aten::sym_size.int(%e, 0)
%q = aten::slice.Tensor(%d, 0, 0, %n2) on cuda:0 [float32, int]
%m = aten::mul.Tensor(%e, %p) on cuda:0 [float32, float32])";

TEST_F(Effects, OperatorsOfWhichACpuGivesOtherBitsThanTheDeviceStay) {
  load(kOnDevice);
  expect_moves("d");
  expect_stays("e", "aten::exp has different last bits on cuda:0 than on a CPU");
  expect_stays("f", "it depends on a value that stays: aten::exp has different last bits");
  for (const graph::Verdict& verdict : verdicts_) EXPECT_FALSE(verdict.has_other_bits || verdict.is_inexact);
}

TEST_F(Effects, OtherBitsMoveWhereResultsMayBeInexactAndUpToOperatorsThatJump) {
  load(kOnDevice);
  graph::EffectOptions options;
  for (const std::string& name : graph_.value_names)
    options.may_be_inexact.push_back(name != "h" && name != "i" && name != "n2");
  load(kOnDevice, options);
  expect_moves("e");
  EXPECT_TRUE(of("e").has_other_bits && of("e").is_inexact);
  EXPECT_EQ(of("e").reason,
            "aten::exp has different last bits on cuda:0 than on a CPU, and cut_tolerance allows moving it");
  expect_moves("f");
  EXPECT_TRUE(!of("f").has_other_bits && of("f").is_inexact);
  expect_stays("g", "aten::floor may turn a difference in last bits into a different result");
  expect_stays("h", "aten::gt.Scalar may turn");
  expect_stays("i", "aten::argmax may turn");
  expect_stays("j", "aten::div.Tensor_mode is not known to have the same bits");
  expect_moves("q");
  EXPECT_FALSE(of("q").is_inexact) << "a size is what it is";
  expect_stays("m", "self.weight");
}

TEST_F(Effects, WhatIsDrawnIsNeverInexact) {
  load(R"(
%r = aten::bernoulli(%x)
%d = aten::alias(%r) on cuda:0 [cpu float32]
%e = aten::exp(%d) on cuda:0 [float32]
%f = aten::bernoulli(%d) on cuda:0 [float32])");
  load(R"(
%r = aten::bernoulli(%x)
%d = aten::alias(%r) on cuda:0 [cpu float32]
%e = aten::exp(%d) on cuda:0 [float32]
%f = aten::bernoulli(%d) on cuda:0 [float32])",
       {.allow_random = true, .may_be_inexact = std::vector<bool>(graph_.value_names.size(), true)});
  expect("d", graph::Level::kRandom, true);
  expect_stays("e", "aten::exp has different last bits");
  expect_stays("f", "aten::bernoulli is not known");
}

TEST_F(Effects, SwitchedOffDrawsAreStateless) {
  load(R"(
%a = aten::dropout(%x, 0.5, false)
%b = aten::scaled_dot_product_attention(%x, %x, %x)
%d = aten::scaled_dot_product_attention(%x, %x, %x, none, 0.0)
%e = aten::feature_dropout(%x, 0.5, false))");
  for (const char* value : {"a", "b", "d", "e"}) expect(value, graph::Level::kStateless, true);
}

TEST_F(Effects, BatchNormThatUpdatesItsStatisticsStays) {
  load(R"(
%m = aten::zeros([4])
%s = aten::ones([4])
%a = aten::batch_norm(%x, none, none, %m, %s, true, 0.1, 1e-05, false)
%after = aten::neg(%m))");
  expect_stays("a", "writes its operand in place");
  expect_stays("after", "aten::batch_norm writes it in place");
}

TEST_F(Effects, BatchNormOfFixedStatisticsIsStateless) {
  load(R"(
%a = aten::batch_norm(%x, none, none, %c, %c, false, 0.1, 1e-05, false)
%b = aten::batch_norm(%x, none, none, none, none, true, 0.1, 1e-05, false))");
  expect("a", graph::Level::kStateless, true);
  expect("b", graph::Level::kStateless, true);
}

TEST_F(Effects, HostReadsStayAndWhatTheyFeedToo) {
  load(R"(
%a = aten::sum(%x)
%b = aten::item(%a)
%d = aten::add.Scalar(%x, %b)
%e = aten::_local_scalar_dense(%a)
%f = aten::equal(%x, %x)
%g = aten::is_nonzero(%a))");
  expect("a", graph::Level::kStateless, true);
  for (const char* value : {"b", "d", "e", "f", "g"}) expect(value, graph::Level::kState, false);
}

TEST_F(Effects, FunctionalInSchemaButNotValues) {
  load(R"(
%a = aten::empty.memory_format([4])
%b = aten::empty_like(%x)
%d = aten::new_empty(%x, [4])
%e = aten::empty_strided([4], [1])
%f = aten::resize(%x, [8])
%g = aten::from_file("/etc/passwd", false, 4)
%h = aten::pin_memory(%x)
%i = aten::to_sparse(%x)
%j = aten::zeros([4], pin_memory=true)
%k1 = aten::zeros([4], layout=layout:sparse_coo))");
  for (const char* value : {"a", "b", "d", "e", "f", "g", "h", "i", "j", "k1"})
    expect(value, graph::Level::kState, false);
}

TEST_F(Effects, DeviceTransfersStay) {
  load(R"(
%a = aten::to.device(%x, device:cuda:0, dtype:float32)
%b = aten::_to_copy(%x, device=device:cuda)
%d = aten::zeros([4], device=device:cuda)
%e = aten::_to_copy(%x, dtype=dtype:float64, device=device:cpu)
%f = aten::to.dtype(%x, dtype:float64))");
  expect_stays("a", "puts its result on cuda");
  expect_stays("b", "puts its result on cuda");
  expect_stays("d", "puts its result on cuda");
  expect("e", graph::Level::kStateless, true);
  expect("f", graph::Level::kStateless, true);
}

TEST_F(Effects, AssertionsAndOtherCallsWithoutResultStay) {
  load(R"(
%a = aten::gt.Scalar(%x, 0)
%s = aten::all(%a)
aten::_assert_async(%s)
%w = aten::neg(%x))");
  EXPECT_FALSE(verdicts_[2].movable);
  EXPECT_NE(verdicts_[2].reason.find("called for its side effect"), std::string::npos) << verdicts_[2].reason;
  expect("w", graph::Level::kStateless, true);
}

TEST_F(Effects, ResizingInPlaceStays) {
  load(R"(
%a = aten::neg(%x)
%w = aten::unsqueeze_(%a, 0))");
  expect("a", graph::Level::kState, false);
  expect("w", graph::Level::kState, false);
}

}  // namespace
}  // namespace penstock::capture
