// SPDX-License-Identifier: Apache-2.0
#include "runtime/script_cut.h"

#include <ATen/core/grad_mode.h>

#include <optional>
#include <utility>

#include "graph/effects.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "runtime/calibrate.h"
#include "runtime/same_bits.h"

namespace penstock::runtime {

using capture::ScriptCall;
using capture::ScriptPart;
using capture::ScriptProgram;

struct ScriptCut::Impl {
  capture::ModuleHandle module;
  ScriptCall example;
  ScriptProgram program;
  graph::Plan plan;
  graph::Graph prefix;
  std::vector<at::Tensor> constants;
  Executor executor;
  ScriptPart suffix;
};

namespace {

// The tensors of the prefix's const inputs, found among those of the whole graph by name.
std::vector<at::Tensor> constants_of(const graph::Graph& prefix, const ScriptProgram& program) {
  std::vector<at::Tensor> taken;
  for (const graph::Input& wanted : prefix.inputs) {
    if (wanted.kind != graph::InputKind::kConst) continue;
    size_t index = 0;
    for (const graph::Input& input : program.graph().inputs) {
      if (input.kind == graph::InputKind::kLeaf) continue;
      if (program.graph().value_names[input.value] == prefix.value_names[wanted.value])
        taken.push_back(program.constants()[index]);
      ++index;
    }
  }
  return taken;
}

// Holds the prefix against the program it came from, on this very batch.
Result<void> check_prefix(const capture::ModuleHandle& module, const ScriptCall& call, const ScriptProgram& program,
                          const graph::Plan& plan, const Executor& executor) {
  const auto reference = program.computing(plan.boundary);
  if (!reference) return reference.error();
  const auto made = executor.run(call.tensors());
  if (!made) return made.error();
  const at::NoGradGuard no_grad;
  const c10::IValue expected = reference.value().run(module.get(), call, {});
  for (size_t i = 0; i < made.value().size(); ++i)
    if (!is_same_bits(made.value()[i], expected.toTupleRef().elements()[i].toTensor()))
      return Fault{Errc::kUnsupported,
                   plan.boundary_names[i] + " has other bits when it is computed apart; leave it to the module"};
  return {};
}

}  // namespace

Result<ScriptCut> ScriptCut::make(const torch::jit::Module& module, const ScriptCall& call,
                                  const ScriptCutOptions& options) {
  const std::vector<at::Tensor> leaves = call.tensors();
  std::vector<std::optional<uint32_t>> leaf_indices(leaves.size());
  for (uint32_t i = 0; i < leaves.size(); ++i) leaf_indices[i] = i;
  auto program = ScriptProgram::read(module, call, leaf_indices);
  if (!program) return program.error();
  const auto verdicts = graph::analyse_effects(program.value().graph(), {options.allow_random});
  const auto& held = program.value().constants();
  const auto calibration = calibrate(program.value().graph(), verdicts, leaves,
                                     std::vector<std::optional<at::Tensor>>(held.begin(), held.end()));
  if (!calibration) return calibration.error();
  auto plan = graph::make_plan(program.value().graph(), verdicts, calibration.value(), options.prices, options.mode);
  if (!plan) return plan.error();
  auto prefix = graph::extract_prefix(program.value().graph(), plan.value());
  if (!prefix) return prefix.error();
  std::vector<at::Tensor> constants = constants_of(prefix.value(), program.value());
  for (at::Tensor& constant : constants) constant = constant.detach().clone();
  auto executor = Executor::create(prefix.value(), constants, {.allow_random = options.allow_random});
  if (!executor) return executor.error();
  auto suffix = program.value().suffix(plan.value());
  if (!suffix) return suffix.error();
  capture::ModuleHandle handle(module);
  if (!options.allow_random && !plan.value().boundary.empty()) {
    const auto checked = check_prefix(handle, call, program.value(), plan.value(), executor.value());
    if (!checked) return checked.error();
  }
  return ScriptCut(std::make_unique<Impl>(Impl{std::move(handle), call, std::move(program).value(),
                                               std::move(plan).value(), std::move(prefix).value(), std::move(constants),
                                               std::move(executor).value(), std::move(suffix).value()}));
}

ScriptCut::ScriptCut(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ScriptCut::~ScriptCut() = default;
ScriptCut::ScriptCut(ScriptCut&&) noexcept = default;
ScriptCut& ScriptCut::operator=(ScriptCut&&) noexcept = default;

const graph::Plan& ScriptCut::plan() const { return impl_->plan; }

std::string ScriptCut::prefix_text() const { return graph::print_graph(impl_->prefix); }

const std::vector<at::Tensor>& ScriptCut::prefix_constants() const { return impl_->constants; }

bool ScriptCut::fits(const ScriptCall& call) const { return impl_->program.holds() && call.is_like(impl_->example); }

Result<std::vector<at::Tensor>> ScriptCut::run_prefix(std::span<const at::Tensor> leaves) const {
  const auto accepted = impl_->executor.accepts(leaves);
  if (!accepted) return accepted.error();
  return impl_->executor.run(leaves);
}

c10::IValue ScriptCut::run_suffix(const ScriptCall& call, std::span<const at::Tensor> boundary) const {
  return impl_->suffix.run(impl_->module.get(), call, boundary);
}

}  // namespace penstock::runtime
