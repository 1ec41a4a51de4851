// SPDX-License-Identifier: Apache-2.0
// TorchScript programs as graphs: running the graph gives the bits of running the module.
// (In text compiled from C++ a dtype is its number: 6 is float32.)

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/jit.h>
#include <torch/csrc/jit/api/module.h>

#include <array>
#include <set>

#include "capture/capture.h"
#include "expect_same.h"
#include "graph/effects.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "graph/plan.h"
#include "runtime/calibrate.h"
#include "runtime/executor.h"

namespace penstock::runtime {
namespace {

using torch::jit::Module;

void flatten(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (value.isTuple())
    for (const c10::IValue& item : value.toTupleRef().elements()) flatten(item, tensors);
  if (value.isList())
    for (const c10::IValue& item : value.toListRef()) flatten(item, tensors);
}

capture::Captured capture(const Module& module, const std::vector<at::Tensor>& leaves) {
  auto captured = capture::capture_torchscript(module, leaves);
  EXPECT_TRUE(captured) << captured.error().message;
  return captured ? std::move(captured).value() : capture::Captured{};
}

std::string capture_refusal(const Module& module, const std::vector<at::Tensor>& leaves) {
  const auto captured = capture::capture_torchscript(module, leaves);
  EXPECT_FALSE(captured) << graph::print_graph(captured.value().graph);
  return captured ? "captured" : captured.error().message;
}

// Captures with `example`, sends the text round, and runs graph and module on `leaves`.
void expect_graph_is_module(Module module, const std::vector<at::Tensor>& example,
                            const std::vector<at::Tensor>& leaves) {
  const capture::Captured captured = capture(module, example);
  auto again = graph::parse_graph(graph::print_graph(captured.graph));
  ASSERT_TRUE(again) << again.error().message;
  const auto executor =
      Executor::create(std::move(again).value(), captured.constants, {.allow_random = true, .allow_state = true});
  ASSERT_TRUE(executor) << executor.error().message;
  const auto outputs = executor.value().run(leaves);
  ASSERT_TRUE(outputs) << outputs.error().message << "\n" << graph::print_graph(captured.graph);
  std::vector<at::Tensor> expected;
  flatten(module.forward(std::vector<c10::IValue>(leaves.begin(), leaves.end())), expected);
  ASSERT_EQ(outputs.value().size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) expect_same(outputs.value()[i], expected[i]);
}

std::set<std::string> operators(const graph::Graph& graph) {
  std::set<std::string> names;
  for (const graph::Node& node : graph.nodes) names.insert(node.op);
  return names;
}

TEST(TorchScript, AnOperatorThatFailsIsNamedWithItsLine) {
  Module module("Product");
  module.define("def forward(self, x):\n    y = x.abs()\n    return y.mm(y)\n");
  const capture::Captured captured = capture(module, {at::zeros({2, 2})});
  graph::Graph graph = captured.graph;
  graph.inputs[0].sizes = {std::string("rows"), std::string("columns")};
  const auto executor = Executor::create(std::move(graph), captured.constants);
  ASSERT_TRUE(executor) << executor.error().message;
  const auto outputs = executor.value().run(std::array{at::zeros({2, 3})});
  ASSERT_FALSE(outputs);
  EXPECT_TRUE(outputs.error().message.starts_with("aten::mm (aten::mm at <string>:3) failed on (float32 [2, 3]"))
      << outputs.error().message;
}

Module normaliser() {
  Module module("Normaliser");
  module.register_parameter("weight", at::rand({3, 5}).requires_grad_(true), false);
  module.register_buffer("mean", at::rand({3}));
  module.register_attribute("scale", c10::FloatType::get(), 255.0);
  module.define(R"(
    def forward(self, x):
      y = x.to(6) / self.scale
      y = y - self.mean
      n, c = y.shape
      z = y.reshape(n * c // 3, -1)
      return torch.matmul(z, self.weight), y.sum(dim=1)
  )");
  return module;
}

TEST(TorchScript, GraphOfAModuleGivesItsBits) {
  const std::vector<at::Tensor> example{at::randint(0, 256, {4, 3}, at::kByte)};
  expect_graph_is_module(normaliser(), example, example);
  expect_graph_is_module(normaliser(), example, {at::randint(0, 256, {9, 3}, at::kByte)});
}

TEST(TorchScript, InputsAreNamedAsTheModuleNamesThem) {
  const Module module = normaliser();
  const capture::Captured captured = capture(module, {at::zeros({4, 3}, at::kByte)});
  std::vector<std::pair<std::string, graph::InputKind>> inputs;
  for (const graph::Input& input : captured.graph.inputs) inputs.emplace_back(input.source, input.kind);
  EXPECT_EQ(inputs, (std::vector<std::pair<std::string, graph::InputKind>>{{"", graph::InputKind::kLeaf},
                                                                           {"self.mean", graph::InputKind::kConst},
                                                                           {"self.weight", graph::InputKind::kState}}));
  ASSERT_EQ(captured.constants.size(), 2u);
  EXPECT_TRUE(captured.constants[0].is_same(module.attr("mean").toTensor()));
}

TEST(TorchScript, PrefixOfACaptureEndsAtTheParameter) {
  const std::vector<at::Tensor> leaves{at::randint(0, 256, {4, 3}, at::kByte)};
  const capture::Captured captured = capture(normaliser(), leaves);
  const auto verdicts = graph::analyse_effects(captured.graph, {});
  const auto calibration =
      calibrate(captured.graph, verdicts, leaves,
                std::vector<std::optional<at::Tensor>>(captured.constants.begin(), captured.constants.end()));
  ASSERT_TRUE(calibration) << calibration.error().message;
  const auto plan = graph::make_plan(captured.graph, verdicts, calibration.value(), {}, graph::CutMode::kMaximal);
  ASSERT_TRUE(plan);
  const auto prefix = graph::extract_prefix(captured.graph, plan.value());
  ASSERT_TRUE(prefix) << prefix.error().message;
  EXPECT_TRUE(operators(prefix.value()).contains("aten::reshape"));
  EXPECT_FALSE(operators(prefix.value()).contains("aten::matmul"));
  EXPECT_TRUE(Executor::create(prefix.value(), {captured.constants[0]}));
}

TEST(TorchScript, SubmodulesAreInlinedAndSharedTensorsAreOneInput) {
  Module child("Child");
  child.register_buffer("shift", at::ones({2}));
  child.define("def forward(self, x):\n  return x + self.shift\n");
  Module parent("Parent");
  parent.register_module("first", child);
  parent.register_module("second", child);
  parent.define("def forward(self, x):\n  return self.second.forward(self.first.forward(x) * 2)\n");
  const std::vector<at::Tensor> leaves{at::rand({3, 2})};
  expect_graph_is_module(parent, leaves, leaves);
  EXPECT_EQ(capture(parent, leaves).constants.size(), 1u);
}

TEST(TorchScript, BranchesOnWhatIsKnownAreTakenAndModeIsAsItIs) {
  Module module("Branches");
  module.register_attribute("training", c10::BoolType::get(), true);
  module.register_attribute("bias", c10::OptionalType::create(c10::TensorType::get()), c10::IValue());
  module.define(R"(
    def forward(self, x):
      if self.training:
        y = x * 2
      else:
        y = x * 3
      if self.bias is not None:
        y = y + 1
      for i in range(3):
        y = y + i
      return y
  )");
  const std::vector<at::Tensor> leaves{at::rand({2, 2})};
  expect_graph_is_module(module, leaves, leaves);
  module.eval();
  expect_graph_is_module(module, leaves, leaves);
}

TEST(TorchScript, InPlaceOperatorsThatTorchCanProveLocalBecomeFunctional) {
  Module module("InPlace");
  module.register_buffer("mean", at::rand({4}));
  module.define(R"(
    def forward(self, x):
      y = x.clone()
      y.sub_(self.mean).div_(2.0)
      return y.relu_()
  )");
  const std::vector<at::Tensor> leaves{at::rand({3, 4})};
  expect_graph_is_module(module, leaves, leaves);
  for (const auto& verdict : graph::analyse_effects(capture(module, leaves).graph, {}))
    EXPECT_TRUE(verdict.movable) << verdict.reason;
}

TEST(TorchScript, BuffersThatForwardWritesAreState) {
  Module module("Counter");
  module.register_buffer("count", at::zeros({1}));
  module.register_buffer("mean", at::zeros({1}));
  module.define(R"(
    def forward(self, x):
      self.count.add_(1)
      return (x - self.mean) * self.count
  )");
  const capture::Captured captured = capture(module, {at::rand({2})});
  for (const graph::Input& input : captured.graph.inputs) {
    if (input.source == "self.count") {
      EXPECT_EQ(input.kind, graph::InputKind::kState);
    }
    if (input.source == "self.mean") {
      EXPECT_EQ(input.kind, graph::InputKind::kConst);
    }
  }
  const auto verdicts = graph::analyse_effects(captured.graph, {});
  for (size_t i = 0; i < verdicts.size(); ++i)
    EXPECT_EQ(verdicts[i].movable, captured.graph.nodes[i].op == "aten::sub.Tensor") << captured.graph.nodes[i].op;
  // Capturing ran nothing.
  EXPECT_EQ(module.attr("count").toTensor().item<float>(), 0);
}

TEST(TorchScript, ListsTuplesAndSizesAreFollowed) {
  Module module("Lists");
  module.define(R"(
    def forward(self, x, pair: Tuple[Tensor, Tensor]):
      a, b = pair
      parts = torch.split(x, 2, 1)
      first = parts[0]
      last = parts[-1]
      both = [a, b]
      both.append(first)
      s = x.size()
      n = len(both)
      return [torch.cat(both, 0) * n, last.view(s[0], -1), torch.zeros([s[0], x.dim()], dtype=x.dtype)]
  )");
  const at::Tensor x = at::rand({3, 4});
  const at::Tensor a = at::rand({1, 2});
  const at::Tensor b = at::rand({2, 2});
  const capture::Captured captured = capture(module, {x, a, b});
  const auto executor = Executor::create(captured.graph, captured.constants);
  ASSERT_TRUE(executor) << executor.error().message;
  const auto outputs = executor.value().run(std::array{x, a, b});
  ASSERT_TRUE(outputs) << outputs.error().message << graph::print_graph(captured.graph);
  std::vector<at::Tensor> expected;
  flatten(module.forward({x, c10::ivalue::Tuple::create({a, b})}), expected);
  ASSERT_EQ(outputs.value().size(), 3u);
  for (size_t i = 0; i < 3; ++i) expect_same(outputs.value()[i], expected[i]);
}

TEST(TorchScript, FunctionsAreCapturedToo) {
  const auto unit = torch::jit::compile(R"(
    def program(x, y):
      return torch.where(x > 0.5, x, y).clamp(min=0.2)
  )");
  const std::vector<at::Tensor> leaves{at::rand({5}), at::rand({5})};
  const auto captured = capture::capture_torchscript(unit->get_function("program"), leaves);
  ASSERT_TRUE(captured) << captured.error().message;
  const auto executor = Executor::create(captured.value().graph, {});
  ASSERT_TRUE(executor) << executor.error().message;
  expect_same(executor.value().run(leaves).value()[0], unit->run_method("program", leaves[0], leaves[1]).toTensor());
}

TEST(TorchScript, ConvolutionalModelIsCapturedWhole) {
  Module module("Net");
  module.register_parameter("weight", at::rand({4, 3, 3, 3}).requires_grad_(true), false);
  module.register_buffer("running_mean", at::rand({4}));
  module.register_buffer("running_var", at::rand({4}) + 1);
  module.register_attribute("training", c10::BoolType::get(), true);
  module.define(R"(
    def forward(self, x):
      x = x.to(6).div(255).sub(0.5)
      x = torch._upsample_bilinear2d_aa(x, [8, 8], False, None)
      y = torch.conv2d(x, self.weight, None, [1, 1], [1, 1], [1, 1], 1)
      y = torch.batch_norm(y, None, None, self.running_mean, self.running_var, self.training, 0.1, 1e-05, False)
      return torch.max_pool2d(torch.relu_(y), [2, 2])
  )");
  const std::vector<at::Tensor> leaves{at::randint(0, 256, {2, 3, 16, 16}, at::kByte)};
  module.eval();
  expect_graph_is_module(module, leaves, leaves);
  module.train();
  const capture::Captured captured = capture(module, leaves);
  for (const graph::Input& input : captured.graph.inputs) {
    if (input.source.starts_with("self.running")) {
      EXPECT_EQ(input.kind, graph::InputKind::kState) << input.source;
    }
  }
  const auto verdicts = graph::analyse_effects(captured.graph, {});
  for (size_t i = 0; i < verdicts.size(); ++i) {
    if (captured.graph.nodes[i].op.find("upsample") == std::string::npos) continue;
    EXPECT_TRUE(verdicts[i].movable) << verdicts[i].reason;
  }
}

Module defined(const std::string& source) {
  Module module("M");
  module.define(source);
  return module;
}

TEST(TorchScript, WhatCannotBeAGraphIsRefusedWithItsReason) {
  const std::vector<at::Tensor> x{at::rand({2, 2})};
  EXPECT_NE(capture_refusal(defined("def forward(self, x, n: int):\n  return x * n\n"), x).find("of type int"),
            std::string::npos);
  EXPECT_NE(capture_refusal(defined("def forward(self, x: List[Tensor]):\n  return x[0]\n"), x).find("Tensor[]"),
            std::string::npos);
  EXPECT_NE(capture_refusal(defined("def forward(self, x, y):\n  return x\n"), x).find("more tensors"),
            std::string::npos);
  EXPECT_NE(capture_refusal(defined("def forward(self, x):\n  return x\n"), {x[0], x[0]}).find("the batch has 2"),
            std::string::npos);
  EXPECT_NE(capture_refusal(defined("def forward(self, x):\n  print(x)\n  return x\n"), x).find("prim::Print"),
            std::string::npos);
  EXPECT_NE(capture_refusal(defined("def forward(self, x):\n  return x\n"), {at::rand({2}).requires_grad_(true)})
                .find("requires grad"),
            std::string::npos);
  EXPECT_NE(capture_refusal(Module("Empty"), x).find("no forward"), std::string::npos);
}

TEST(TorchScript, AttributesThatForwardSetsAreRefused) {
  Module module("Setter");
  module.register_attribute("calls", c10::IntType::get(), 0);
  module.define("def forward(self, x):\n  self.calls = self.calls + 1\n  return x * self.calls\n");
  EXPECT_NE(capture_refusal(module, {at::rand({2})}).find("prim::SetAttr"), std::string::npos);
}

TEST(TorchScript, ReadingATensorOnTheHostStays) {
  const Module module = defined("def forward(self, x):\n  return x * int(x.sum())\n");
  const std::vector<at::Tensor> leaves{at::rand({2, 2}) * 10};
  expect_graph_is_module(module, leaves, leaves);
  const capture::Captured captured = capture(module, leaves);
  const auto verdicts = graph::analyse_effects(captured.graph, {});
  EXPECT_TRUE(verdicts.front().movable);
  EXPECT_FALSE(verdicts.back().movable);
}

}  // namespace
}  // namespace penstock::runtime
