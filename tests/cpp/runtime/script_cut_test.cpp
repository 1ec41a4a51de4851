// SPDX-License-Identifier: Apache-2.0
// A TorchScript module cut in two gives the same as the whole, to the bit, gradients too.

#include "runtime/script_cut.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/jit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <sstream>

#include "expect_same.h"
#include "graph/ir_text.h"

namespace penstock::runtime {
namespace {

using capture::ScriptCall;
using graph::CutMode;
using torch::jit::Module;

// Programs are not optimized, so that two modules do not differ by how often they ran.
class ScriptCutTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::jit::setGraphExecutorOptimize(false); }
  void TearDown() override { torch::jit::setGraphExecutorOptimize(true); }
};

Module model(const std::string& forward) {
  Module module("Model");
  at::manual_seed(1);
  module.register_parameter("weight", at::randn({5, 4}).requires_grad_(true), false);
  module.register_buffer("mean", at::rand({5}));
  module.register_buffer("seen", at::zeros({}));
  module.register_attribute("training", c10::BoolType::get(), true);
  module.define(forward);
  return module;
}

const std::string kForward = R"(
    def forward(self, x, power: int = 2):
      y = ((x.to(6) - self.mean) / 255.).pow(power)
      if self.training:
        y = y.clamp(0., 0.5)
        self.seen.add_(1)
      z = torch.matmul(y, self.weight)
      if bool(z.sum() > 0):
        z = z * 2
      return z, y.sum(dim=1)
)";

ScriptCut cut_of(const Module& module, const ScriptCall& call) {
  auto cut = ScriptCut::make(module, call, {.mode = CutMode::kMaximal});
  EXPECT_TRUE(cut) << cut.error().message;
  return std::move(cut).value();
}

ScriptCall call_with(int64_t rows, int64_t power = 2) { return {{at::randint(0, 256, {rows, 5}, at::kByte), power}}; }

// Runs both, and compares results, gradients and buffers.
void expect_cut_is_whole(const ScriptCut& cut, Module module, Module whole, const ScriptCall& call) {
  const auto boundary = cut.run_prefix(call.tensors());
  ASSERT_TRUE(boundary) << boundary.error().message;
  const c10::IValue ours = cut.run_suffix(call, boundary.value());
  const c10::IValue theirs = whole.forward(call.arguments);
  for (size_t i = 0; i < 2; ++i)
    expect_same(ours.toTupleRef().elements()[i].toTensor().detach(),
                theirs.toTupleRef().elements()[i].toTensor().detach());
  ours.toTupleRef().elements()[0].toTensor().square().sum().backward();
  theirs.toTupleRef().elements()[0].toTensor().square().sum().backward();
  expect_same(module.attr("weight").toTensor().grad(), whole.attr("weight").toTensor().grad());
  expect_same(module.attr("seen").toTensor(), whole.attr("seen").toTensor());
}

TEST_F(ScriptCutTest, CutModuleGivesTheBitsOfTheWhole) {
  const Module module = model(kForward), whole = model(kForward);
  const ScriptCut cut = cut_of(module, call_with(6));
  EXPECT_EQ(cut.plan().moved.size(), 6u);
  for (const int64_t rows : {6, 9, 1}) expect_cut_is_whole(cut, module, whole, call_with(rows));
}

TEST_F(ScriptCutTest, ModuleFromAFileIsCut) {
  std::stringstream file;
  model(kForward).save(file);
  const Module module = torch::jit::load(file);
  file.seekg(0);
  expect_cut_is_whole(cut_of(module, call_with(6)), module, torch::jit::load(file), call_with(7));
}

TEST_F(ScriptCutTest, AnotherModeOrAnotherArgumentDoesNotFit) {
  Module module = model(kForward);
  const ScriptCut cut = cut_of(module, call_with(6));
  EXPECT_TRUE(cut.fits(call_with(3)));
  EXPECT_FALSE(cut.fits(call_with(6, 3)));
  EXPECT_FALSE(cut.fits({{at::rand({6, 5}), int64_t{2}}}));
  module.eval();
  EXPECT_FALSE(cut.fits(call_with(6)));
  module.train();
  EXPECT_TRUE(cut.fits(call_with(6)));
  module.setattr("mean", at::rand({5}));
  EXPECT_FALSE(cut.fits(call_with(6)));
}

TEST_F(ScriptCutTest, PrefixTravelsAsText) {
  const Module module = model(kForward);
  const ScriptCut cut = cut_of(module, call_with(6));
  auto graph = graph::parse_graph(cut.prefix_text());
  ASSERT_TRUE(graph) << graph.error().message;
  const auto elsewhere = Executor::create(std::move(graph).value(), cut.prefix_constants());
  ASSERT_TRUE(elsewhere) << elsewhere.error().message;
  const ScriptCall call = call_with(8);
  const auto here = cut.run_prefix(call.tensors()), there = elsewhere.value().run(call.tensors());
  ASSERT_EQ(here.value().size(), there.value().size());
  for (size_t i = 0; i < here.value().size(); ++i) expect_same(here.value()[i], there.value()[i]);
}

TEST_F(ScriptCutTest, BatchThatDoesNotFitThePrefixIsAMismatch) {
  const ScriptCut cut = cut_of(model(kForward), call_with(6));
  EXPECT_FALSE(cut.run_prefix(std::vector<at::Tensor>{at::rand({6, 5})}));
}

TEST_F(ScriptCutTest, ControlFlowThatIsKeptWholeMayWriteAndRaise) {
  const std::string forward = R"(
    def forward(self, x, power: int):
      y = x.to(6) * 0.5
      if y.size(0) == 1:
        assert False, "one row"
      if bool(y.sum() > 0):
        self.mean.add_(1.)
      z = y.sin()
      return torch.matmul(z + self.mean, self.weight), z
)";
  const Module module = model(forward), whole = model(forward);
  const ScriptCut cut = cut_of(module, call_with(6));
  for (const auto& group : cut.plan().moved) EXPECT_EQ(group.label.find("add_"), std::string::npos);
  EXPECT_FALSE(cut.plan().moved.empty());
  for (const int64_t rows : {6, 4}) expect_cut_is_whole(cut, module, whole, call_with(rows));
  expect_same(module.attr("mean").toTensor(), whole.attr("mean").toTensor());
  const ScriptCall one = call_with(1);
  EXPECT_ANY_THROW(cut.run_suffix(one, cut.run_prefix(one.tensors()).value()));
}

TEST_F(ScriptCutTest, ListsWrittenInsideOfControlFlowAreRefused) {
  const auto cut = ScriptCut::make(model(R"(
    def forward(self, x, power: int):
      parts = [x]
      for i in range(x.size(0)):
        parts.append(x)
      return torch.cat(parts), x
)"),
                                   call_with(3));
  ASSERT_FALSE(cut);
  EXPECT_NE(cut.error().message.find("writes to a list"), std::string::npos) << cut.error().message;
}

}  // namespace
}  // namespace penstock::runtime
