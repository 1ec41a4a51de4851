// SPDX-License-Identifier: Apache-2.0
#include "api/script_cut.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <memory>

#include "graph/effects.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "runtime/calibrate.h"
#include "runtime/executor.h"
#include "runtime/kernel_settings.h"
#include "runtime/same_bits.h"
#include "worker/prefix_message.h"

namespace penstock::api {

using capture::ScriptCall;
using capture::ScriptProgram;

namespace {

constexpr int64_t kSmallBytesMax = 16 << 10;
// Libraries of operators that only compute.
const std::set<std::string, std::less<>> kKnownLibraries = {"aten",        "size",        "list",    "opaque",
                                                            "opaque_view", "torchscript", "declared"};

void refuse_effects(const graph::Graph& graph) {
  for (const graph::Node& node : graph.nodes) {
    const std::string name(node.op);
    const std::string library = name.substr(0, name.find("::"));
    if (!kKnownLibraries.contains(library)) {
      throw Refusal{"the module uses " + name +
                    ", which may do more than compute, so it cannot be run once more to compare"};
    }
  }
}

}  // namespace

ScriptMode ScriptMode::now() {
  return {.has_gradients = at::GradMode::is_enabled(), .is_optimized = torch::jit::getGraphExecutorOptimize()};
}

std::vector<BoundaryLayout> BoundaryLayout::of(std::span<const at::Tensor> tensors) {
  std::vector<BoundaryLayout> layouts;
  layouts.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    layouts.push_back(
        {.dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec(), .strides = tensor.strides().vec()});
  }
  return layouts;
}

// A version that stayed is no proof, so small constants are compared each time; of large ones only the comparison of
// whole batches can tell.
bool ScriptCut::has_changed() {
  for (Constant& constant : constants) {
    const at::Tensor& now = program.constants()[constant.index];
    const uint32_t version = now.unsafeGetTensorImpl()->version_counter().current_version();
    const bool is_marked = now.const_data_ptr() == constant.address && version == constant.version;
    if (is_marked && static_cast<int64_t>(now.nbytes()) > kSmallBytesMax) continue;
    if (!runtime::is_same_bits(now.detach(), constant.copy)) return true;
    constant.address = now.const_data_ptr();
    constant.version = version;
  }
  return false;
}

ScriptCut plan_script(const torch::jit::Module& module, const ScriptCall& call,
                      std::vector<std::optional<uint32_t>> leaf_indices, const std::vector<at::Tensor>& leaves,
                      const graph::Prices& prices, graph::CutMode mode) {
  const bool has_leaf =
      std::any_of(leaf_indices.begin(), leaf_indices.end(), [](const auto& one) { return one.has_value(); });
  if (!has_leaf) {
    throw Refusal{
        "no tensor of the batch is an argument of the module by itself and on the CPU; TorchScript is read when "
        "it takes tensors and tuples of tensors"};
  }
  auto program = value_or_refuse(ScriptProgram::read(module, call, leaf_indices));
  const graph::Graph& graph = program.graph();
  refuse_effects(graph);
  const auto verdicts = graph::analyse_effects(graph, {});
  const auto& held = program.constants();
  const auto calibration = value_or_refuse(
      runtime::calibrate(graph, verdicts, leaves, std::vector<std::optional<at::Tensor>>(held.begin(), held.end())));
  auto plan = value_or_refuse(graph::make_plan(graph, verdicts, calibration, prices, mode));
  const graph::Graph prefix =
      value_or_refuse(graph::extract_prefix(graph, plan, {}, runtime::KernelSettings::now().text()));
  ScriptCut cut{
      .leaf_indices = std::move(leaf_indices), .call = call, .program = std::move(program), .plan = std::move(plan)};
  if (prefix.outputs.empty()) return cut;
  const graph::Graph& whole = cut.program.graph();
  for (const auto& output : prefix.outputs) cut.keys.push_back(output.key);
  cut.operators = cut.plan.boundary_names;
  std::vector<at::Tensor> constants;
  for (const graph::Input& wanted : prefix.inputs) {
    if (wanted.kind != graph::InputKind::kConst) continue;
    size_t index = 0;
    for (const graph::Input& input : whole.inputs) {
      if (input.kind == graph::InputKind::kLeaf) continue;
      if (whole.value_names[input.value] == prefix.value_names[wanted.value]) {
        const at::Tensor& constant = cut.program.constants()[index];
        constants.push_back(constant.detach());
        cut.constants.push_back({.index = index,
                                 .copy = constant.detach().clone(),
                                 .address = constant.const_data_ptr(),
                                 .version = constant.unsafeGetTensorImpl()->version_counter().current_version()});
      }
      ++index;
    }
  }
  cut.suffix = value_or_refuse(cut.program.suffix(cut.plan));
  cut.reference = value_or_refuse(cut.program.computing(cut.plan.boundary));
  // Holds the prefix against the calls it came from, on this very batch.
  const auto executor = value_or_refuse(runtime::Executor::create(prefix, constants));
  const auto made = value_or_refuse(executor.run(leaves));
  const at::NoGradGuard no_grad;
  const c10::IValue expected = cut.reference->run(&module, call, {});
  for (size_t index = 0; index < made.size(); ++index) {
    if (!runtime::is_same_bits(made[index], expected.toTupleRef().elements()[index].toTensor()))
      throw Refusal{cut.operators[index] + " gives other bits in a worker than in the trainer"};
  }
  const auto message = value_or_refuse(
      worker::write_prefix_message({.text = graph::print_graph(prefix), .constants = std::move(constants)}));
  cut.message = std::make_shared<const std::vector<std::byte>>(message);
  return cut;
}

}  // namespace penstock::api
