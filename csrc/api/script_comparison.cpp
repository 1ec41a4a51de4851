// SPDX-License-Identifier: Apache-2.0
#include "api/script_comparison.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <vector>

#include "runtime/same_bits.h"

namespace penstock::api {
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
