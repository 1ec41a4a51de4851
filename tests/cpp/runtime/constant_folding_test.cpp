// SPDX-License-Identifier: Apache-2.0
#include "runtime/constant_folding.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>

#include "capture/capture.h"
#include "graph/ir_text.h"
#include "runtime/executor.h"

namespace penstock::runtime {
namespace {

constexpr const char* kInputs =
    "penstock-ir 1\ninput %x leaf 0 float32 [n, 4]\ninput %c const \"self.deviation\" float32 [4]\n"
    "input %n int \"n\" = %x.size(0)\n";

Executor folded(const std::string& statements, const at::Tensor& constant) {
  auto graph = graph::parse_graph(kInputs + statements);
  EXPECT_TRUE(graph) << graph.error().message;
  auto executor = Executor::create(std::move(graph).value(), {constant});
  EXPECT_TRUE(executor) << executor.error().message;
  return std::move(executor).value();
}

at::Tensor result_of(const Executor& executor, const at::Tensor& x) {
  auto outputs = executor.run(std::array{x});
  EXPECT_TRUE(outputs) << outputs.error().message;
  return outputs.value().at(0);
}

TEST(ConstantFolding, WhatDependsOnConstantsAloneIsNotRunForABatch) {
  const at::Tensor deviation = at::rand({4}) + 0.5;
  const at::Tensor x = at::randn({3, 4});
  const Executor executor = folded(
      "%k = aten::arange(4, dtype=dtype:float32)\n%r = aten::reciprocal(%c)\n%s = aten::mul.Tensor(%r, %k)\n"
      "%y = aten::mul.Tensor(%x, %s)\noutput %y\n",
      deviation);
  EXPECT_EQ(executor.saved_node_count(), 3u);
  for (int batch = 0; batch < 2; ++batch)
    EXPECT_TRUE(at::equal(result_of(executor, x), x * (deviation.reciprocal() * at::arange(4, at::kFloat))));
}

TEST(ConstantFolding, SizesOfTheBatchAreNoConstants) {
  const Executor executor = folded("%m = size::mul(%n, 2)\n%y = aten::full([%m], 1.5)\noutput %y\n", at::zeros({4}));
  EXPECT_EQ(executor.saved_node_count(), 0u);
  for (const int64_t rows : {2, 5})
    EXPECT_TRUE(at::equal(result_of(executor, at::zeros({rows, 4})), at::full({rows * 2}, 1.5)));
}

TEST(ConstantFolding, WritingToAnOutputChangesNoLaterBatch) {
  const at::Tensor deviation = at::rand({4});
  for (const char* statements :
       {"%y = aten::exp(%c)\noutput %y\n", "%e = aten::exp(%c)\n%y = aten::view(%e, [2, 2])\noutput %y\n",
        "%e = aten::exp(%c)\n%y = aten::expand_as(%e, %x)\noutput %y\n",
        "%e = aten::exp(%c)\n%f = aten::contiguous(%e)\n%y = aten::expand_as(%f, %x)\noutput %y\n"}) {
    const Executor executor = folded(statements, deviation);
    const at::Tensor first = result_of(executor, at::zeros({1, 4}));
    const at::Tensor expected = first.clone();
    first.zero_();
    EXPECT_TRUE(at::equal(result_of(executor, at::zeros({1, 4})), expected)) << statements;
  }
}

TEST(ConstantFolding, UnderOtherSettingsThanItWasFoldedUnderARunComputesEverything) {
  // A sum that is split among threads is another sum.
  const at::Tensor constant = at::rand({4});
  const std::string statements =
      "%r = aten::rsqrt(%c)\n%t = aten::mul.Scalar(%r, 1e-30)\n%u = aten::mul.Scalar(%t, 1e-12)\n"
      "%y = aten::add.Tensor(%x, %u)\noutput %y\n";
  const Executor executor = folded(statements, constant);
  EXPECT_EQ(executor.saved_node_count(), 3u);
  const at::Tensor x = at::zeros({1, 4});
  EXPECT_TRUE(result_of(executor, x).ne(0).all().item<bool>());
  ASSERT_TRUE(at::globalContext().setFlushDenormal(true));
  const at::Tensor flushed = result_of(executor, x);
  at::globalContext().setFlushDenormal(false);
  EXPECT_TRUE(flushed.eq(0).all().item<bool>());
}

TEST(ConstantFolding, WhatFailsFailsInTheRunAndSaysSo) {
  const Executor executor = folded(
      "%v = aten::view(%c, [3])\n%w = aten::neg(%v)\n%y = aten::add.Tensor(%x, %w)\noutput %y\n", at::zeros({4}));
  EXPECT_EQ(executor.saved_node_count(), 0u);
  const auto outputs = executor.run(std::array{at::zeros({1, 4})});
  ASSERT_FALSE(outputs);
  EXPECT_TRUE(outputs.error().message.starts_with("aten::view failed on")) << outputs.error().message;
}

TEST(ConstantFolding, MemoryThatIsKeptIsBounded) {
  auto graph = graph::parse_graph(std::string(kInputs) +
                                  "%a = aten::zeros([1000])\n%v = aten::view(%a, [10, 100])\n%b = aten::ones([1000])\n"
                                  "%d = aten::neg(%b)\n%s = aten::sum(%v)\n%t = aten::sum(%d)\n"
                                  "%u = aten::add.Tensor(%s, %t)\n%y = aten::add.Tensor(%x, %u)\noutput %y\n");
  ASSERT_TRUE(graph) << graph.error().message;
  capture::annotate(graph.value());
  std::vector<OperatorCall> calls;
  for (const graph::Node& node : graph.value().nodes) calls.push_back(OperatorCall::prepare(node).value());
  Frame constants(graph.value().value_names.size());
  constants[1] = at::zeros({4});
  const Folding folding = fold_constants(graph.value(), calls, constants, 6000);
  // The view takes no memory of its own; the second thousand is too much.
  EXPECT_EQ(folding.is_folded, (std::vector<bool>{true, true, false, false, false, false, false, false}));
  EXPECT_EQ(folding.node_count, 2u);
}

TEST(ConstantFolding, WhatOnlyFoldedNodesReadIsDropped) {
  auto graph = graph::parse_graph(
      std::string(kInputs) + "%a = aten::zeros([4])\n%b = aten::neg(%a)\n%y = aten::add.Tensor(%x, %b)\noutput %y\n");
  capture::annotate(graph.value());
  std::vector<OperatorCall> calls;
  for (const graph::Node& node : graph.value().nodes) calls.push_back(OperatorCall::prepare(node).value());
  Frame constants(graph.value().value_names.size());
  constants[1] = at::zeros({4});
  const Folding folding = fold_constants(graph.value(), calls, constants);
  EXPECT_EQ(folding.node_count, 2u);
  EXPECT_TRUE(folding.start[3].isNone());
  EXPECT_TRUE(folding.start[4].isTensor());
}

}  // namespace
}  // namespace penstock::runtime
