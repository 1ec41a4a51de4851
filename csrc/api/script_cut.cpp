// SPDX-License-Identifier: Apache-2.0
#include "api/script_cut.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "graph/effects.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "runtime/calibrate.h"
#include "runtime/compiled_prefix.h"
#include "runtime/executor.h"
#include "runtime/kernel_settings.h"
#include "runtime/placement.h"
#include "worker/prefix_stage.h"

namespace penstock::api {

using capture::ScriptCall;
using capture::ScriptProgram;

namespace {

constexpr int64_t kSmallBytesMax = 16 << 10;
// Libraries whose operators have no side effects.
const std::set<std::string, std::less<>> kKnownLibraries = {"aten",        "size",        "list",    "opaque",
                                                            "opaque_view", "torchscript", "declared"};

void refuse_effects(const graph::Graph& graph) {
  for (const graph::Node& node : graph.nodes) {
    const std::string name(node.op);
    const std::string library = name.substr(0, name.find("::"));
    if (!kKnownLibraries.contains(library)) {
      throw Refusal{"the module uses " + name + ", which may have side effects, so it cannot be re-run for comparison"};
    }
  }
}

// The constants on the CPU; state inputs are left out.
std::vector<std::optional<at::Tensor>> constants_of(const graph::Graph& graph, std::span<const at::Tensor> held) {
  std::vector<std::optional<at::Tensor>> found;
  for (const graph::Input& input : graph.inputs) {
    if (input.kind == graph::InputKind::kConst) found.emplace_back(held[found.size()].detach().cpu());
    if (input.kind == graph::InputKind::kState) found.emplace_back(std::nullopt);
  }
  return found;
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

// An unchanged version is no proof, so small constants are compared each time; changes to large ones are found only
// by the comparison of whole batches.
bool ScriptCut::has_changed() {
  for (Constant& constant : constants) {
    const at::Tensor& now = program->constants()[constant.index];
    const uint32_t version = now.unsafeGetTensorImpl()->version_counter().current_version();
    const bool is_marked = now.const_data_ptr() == constant.address && version == constant.version;
    // Reading a tensor on a device would make the host wait for the device.
    if (is_marked && (!now.is_cpu() || static_cast<int64_t>(now.nbytes()) > kSmallBytesMax)) continue;
    if (!runtime::is_same_bits(now.detach().cpu(), constant.copy)) return true;
    constant.address = now.const_data_ptr();
    constant.version = version;
  }
  return false;
}

bool ScriptCut::has_moved() const {
  const auto& now = program->constants();
  return !std::equal(now.begin(), now.end(), held_devices.begin(), held_devices.end(),
                     [](const at::Tensor& tensor, const c10::Device& device) { return tensor.device() == device; });
}

std::vector<c10::Device> ScriptCut::accelerators() const {
  std::vector<c10::Device> found;
  for (const auto& device : value_devices)
    if (device && std::find(found.begin(), found.end(), *device) == found.end()) found.push_back(*device);
  return found;
}

namespace {

// Makes the cut that the plans choose, and verifies it on this batch.
ScriptCut cut_by(ScriptCut cut, const torch::jit::Module& module, const std::vector<at::Tensor>& host_leaves) {
  const graph::Graph& graph = cut.plans->graph();
  const graph::Graph prefix =
      value_or_refuse(graph::extract_prefix(graph, cut.plan(), {}, runtime::KernelSettings::now().text()));
  if (prefix.outputs.empty()) return cut;
  for (const auto& output : prefix.outputs) cut.keys.push_back(output.key);
  for (const graph::ValueId value : cut.plan().boundary) cut.devices.push_back(cut.value_devices[value]);
  cut.operators = cut.plan().boundary_names;
  std::vector<at::Tensor> constants;
  for (const graph::Input& wanted : prefix.inputs) {
    if (wanted.kind != graph::InputKind::kConst) continue;
    size_t index = 0;
    for (const graph::Input& input : graph.inputs) {
      if (input.kind == graph::InputKind::kLeaf) continue;
      if (graph.value_names[input.value] == prefix.value_names[wanted.value]) {
        const at::Tensor& constant = cut.program->constants()[index];
        constants.push_back(constant.detach().cpu());
        cut.constants.push_back({.index = index,
                                 .copy = constant.detach().to(at::kCPU, constant.scalar_type(),
                                                              /*non_blocking=*/false, /*copy=*/true),
                                 .address = constant.const_data_ptr(),
                                 .version = constant.unsafeGetTensorImpl()->version_counter().current_version()});
      }
      ++index;
    }
  }
  cut.suffix = value_or_refuse(cut.program->suffix(cut.plan()));
  cut.reference = value_or_refuse(cut.program->computing(cut.plan().boundary));
  const auto executor = value_or_refuse(runtime::Executor::create(prefix, constants));
  const auto made = value_or_refuse(executor.run(host_leaves));
  const at::NoGradGuard no_grad;
  const c10::IValue expected = cut.reference->run(&module, cut.call, {});
  for (size_t index = 0; index < made.size(); ++index) {
    const at::Tensor& reference = expected.toTupleRef().elements()[index].toTensor();
    if (reference.device() != cut.devices[index].value_or(at::kCPU))
      throw Refusal{cut.operators[index] + " is on " + reference.device().str() +
                    ", not on the device that was captured"};
    if (!runtime::is_same_bits(made[index], reference.cpu()))
      throw Refusal{cut.operators[index] + " returns other bits in a worker than in the trainer"};
  }
  const auto message = value_or_refuse(
      worker::write_prefix_message({.text = graph::print_graph(prefix), .constants = std::move(constants)}));
  cut.message = std::make_shared<const std::vector<std::byte>>(message);
  return cut;
}

}  // namespace

ScriptCut plan_script(const torch::jit::Module& module, const ScriptCall& call,
                      std::vector<std::optional<uint32_t>> leaf_indices, const std::vector<at::Tensor>& leaves,
                      const graph::Prices& prices, graph::CutMode mode) {
  const bool has_leaf =
      std::any_of(leaf_indices.begin(), leaf_indices.end(), [](const auto& one) { return one.has_value(); });
  if (!has_leaf) {
    throw Refusal{
        "the module must take tensors or tuples of tensors for TorchScript to be captured, but no tensor of the batch "
        "is a direct argument"};
  }
  auto program = std::make_shared<ScriptProgram>(value_or_refuse(ScriptProgram::read(module, call, leaf_indices)));
  refuse_effects(program->graph());
  runtime::PlacedGraph placed = runtime::place_on_devices(program->graph(), leaves, program->constants());
  auto verdicts = graph::analyse_effects(placed.graph, {});
  const std::vector<at::Tensor> host_leaves = runtime::on_host(leaves);
  auto calibration = value_or_refuse(
      runtime::calibrate(placed.graph, verdicts, host_leaves, constants_of(placed.graph, program->constants())));
  auto plans = value_or_refuse(
      graph::PricedPlans::make(std::move(placed.graph), std::move(verdicts), std::move(calibration), prices, mode));
  std::vector<c10::Device> held_devices;
  for (const at::Tensor& tensor : program->constants()) held_devices.push_back(tensor.device());
  return cut_by({.leaf_indices = std::move(leaf_indices),
                 .call = call,
                 .program = std::move(program),
                 .plans = std::make_shared<const graph::PricedPlans>(std::move(plans)),
                 .value_devices = std::move(placed.devices),
                 .held_devices = std::move(held_devices)},
                module, host_leaves);
}

ScriptCut plan_again(const ScriptCut& cut, const torch::jit::Module& module, const ScriptCall& call,
                     const std::vector<at::Tensor>& leaves, const graph::Prices& prices) {
  const graph::PricedPlans& before = *cut.plans;
  auto plans = value_or_refuse(
      graph::PricedPlans::make(before.graph(), before.verdicts(), before.calibration(), prices, graph::CutMode::kAuto));
  ScriptCut other = cut_by({.leaf_indices = cut.leaf_indices,
                            .call = call,
                            .program = cut.program,
                            .plans = std::make_shared<const graph::PricedPlans>(std::move(plans)),
                            .value_devices = cut.value_devices,
                            .held_devices = cut.held_devices},
                           module, runtime::on_host(leaves));
  other.runs = cut.runs;  // of the whole program, which is optimized by now
  return other;
}

namespace {

struct Seen {
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> held;  // parameters and buffers, after the run
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> drawn;  // the states of the generators
};
constexpr std::array<const char*, 4> kKinds = {"results", "in-place writes", "gradients", "random numbers"};

// Saves the generators of the CPU and the devices, and restores them at the end of its scope.
class GeneratorsKept {
 public:
  explicit GeneratorsKept(std::span<const c10::Device> devices) {
    generators_.push_back(at::detail::getDefaultCPUGenerator());
    for (const c10::Device& device : devices) generators_.push_back(at::globalContext().defaultGenerator(device));
    states_ = now();
  }
  GeneratorsKept(const GeneratorsKept&) = delete;
  GeneratorsKept& operator=(const GeneratorsKept&) = delete;
  ~GeneratorsKept() {
    for (size_t index = 0; index < generators_.size(); ++index) generators_[index].set_state(states_[index]);
  }
  std::vector<at::Tensor> now() const {
    std::vector<at::Tensor> states;
    for (const at::Generator& generator : generators_) states.push_back(generator.get_state());
    return states;
  }

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) collect(element, tensors);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) collect(element, tensors);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) collect(entry.value(), tensors);
  }
}

torch::jit::Module twin_of(const torch::jit::Module& module) {
  torch::jit::Module twin = [&] {
    const at::NoGradGuard no_grad;  // with gradients on, TorchScript copies parameters as results of the module
    return module.deepcopy();
  }();
  const auto theirs = module.parameters();
  auto other = theirs.begin();
  for (at::Tensor ours : twin.parameters()) {
    ours.requires_grad_((*other).requires_grad());
    ++other;
  }
  return twin;
}

Seen observe(const torch::jit::Module& module, const capture::ScriptCall& call, const ScriptSide& side,
             std::span<const c10::Device> devices) {
  const torch::jit::Module twin = twin_of(module);
  const GeneratorsKept generators(devices);
  Seen seen;
  collect(side.part.run(&twin, call, side.more), seen.results);
  std::vector<at::Tensor> ends;
  std::vector<at::Tensor> starts;
  for (const at::Tensor& result : seen.results)
    if (result.requires_grad()) ends.push_back(result);
  for (const at::Tensor& parameter : twin.parameters())
    if (parameter.requires_grad()) starts.push_back(parameter);
  if (!ends.empty() && !starts.empty()) {
    std::vector<at::Tensor> seeds;
    auto drawn = at::detail::createCPUGenerator(0);
    for (const at::Tensor& end : ends)
      seeds.push_back(at::randn(end.sizes(), drawn, at::TensorOptions().dtype(at::kFloat)).to(end.options()));
    seen.gradients = torch::autograd::grad(ends, starts, seeds, /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                                           /*allow_unused=*/true);
  }
  for (const at::Tensor& parameter : twin.parameters()) seen.held.push_back(parameter.detach());
  for (const at::Tensor& buffer : twin.buffers()) seen.held.push_back(buffer.detach());
  seen.drawn = generators.now();
  return seen;
}

bool are_same(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs) {
  if (ours.size() != theirs.size()) return false;
  for (size_t index = 0; index < ours.size(); ++index) {
    const at::Tensor& a = ours[index];
    const at::Tensor& b = theirs[index];
    if (a.defined() != b.defined()) return false;
    if (!a.defined()) continue;
    if (a.requires_grad() != b.requires_grad() || a.layout() != at::kStrided || b.layout() != at::kStrided)
      return false;
    if (!runtime::is_same_bits(a.detach(), b.detach())) return false;
  }
  return true;
}

}  // namespace

std::optional<std::string> first_difference(const torch::jit::Module& module, const capture::ScriptCall& call,
                                            const ScriptSide& whole, const ScriptSide& part,
                                            std::span<const c10::Device> devices) {
  const Seen expected = observe(module, call, whole, devices);
  const Seen seen = observe(module, call, part, devices);
  const std::array<bool, kKinds.size()> is_same = {
      are_same(seen.results, expected.results), are_same(seen.held, expected.held),
      are_same(seen.gradients, expected.gradients), are_same(seen.drawn, expected.drawn)};
  for (size_t kind = 0; kind < kKinds.size(); ++kind)
    if (!is_same[kind]) return kKinds[kind];
  return std::nullopt;
}

void settle(const torch::jit::Module& module, const capture::ScriptCall& call, const ScriptSide& side,
            std::span<const c10::Device> devices) {
  for (int run = 0; run < kSettledRuns; ++run) static_cast<void>(observe(module, call, side, devices));
}

}  // namespace penstock::api
