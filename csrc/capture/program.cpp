// SPDX-License-Identifier: Apache-2.0
#include "capture/program.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <set>

#include "base/result.h"
#include "capture/capture.h"
#include "capture/torchscript.h"
#include "graph/sha256.h"

namespace penstock::capture {

namespace jit = torch::jit;

namespace {

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (value.isTuple())
    for (const c10::IValue& item : value.toTupleRef().elements()) collect(item, tensors);
}

c10::IValue replaced(const c10::IValue& value, std::span<const at::Tensor>& rest) {
  if (value.isTensor()) {
    const at::Tensor first = rest.front();
    rest = rest.subspan(1);
    return first;
  }
  if (!value.isTuple()) return value;
  std::vector<c10::IValue> items;
  for (const c10::IValue& item : value.toTupleRef().elements()) items.push_back(replaced(item, rest));
  return c10::ivalue::Tuple::create(std::move(items));
}

bool means_the_same(const c10::IValue& a, const c10::IValue& b) {
  if (a.isTensor() && b.isTensor()) {
    const at::Tensor &one = a.toTensor(), &other = b.toTensor();
    return one.defined() && other.defined() && one.scalar_type() == other.scalar_type() && one.dim() == other.dim() &&
           one.device() == other.device() && one.layout() == other.layout() &&
           one.requires_grad() == other.requires_grad();
  }
  if (a.isTuple() && b.isTuple()) {
    const auto &one = a.toTupleRef().elements(), &other = b.toTupleRef().elements();
    return std::equal(one.begin(), one.end(), other.begin(), other.end(), means_the_same);
  }
  return is_same_value(a, b);
}

// Their gradients are one call of the same operator, whether the optimizer or autograd makes it.
bool has_one_gradient(const jit::Node* node) { return node->kind() == c10::aten::embedding; }

bool makes_tensors(const jit::Node* node) {
  return std::any_of(node->outputs().begin(), node->outputs().end(),
                     [](const jit::Value* value) { return value->type()->kind() == c10::TypeKind::TensorType; });
}

// Appends the operators of the optimizer's groups in a block to `operators`.
void describe(const jit::Block* block, bool is_group, std::vector<std::string>& operators) {
  for (const jit::Node* node : block->nodes()) {
    if (node->hasAttribute(c10::attr::Subgraph))
      describe(node->g(c10::attr::Subgraph)->block(), true, operators);
    else if (is_group && makes_tensors(node) && node->kind() != c10::prim::Constant && !has_one_gradient(node))
      operators.push_back(place_of(node));
    for (const jit::Block* nested : node->blocks()) describe(nested, is_group, operators);
  }
}

ScriptPart part_of(const std::string& name, std::shared_ptr<jit::Graph> graph, bool is_optimized) {
  auto function = std::make_shared<jit::GraphFunction>(c10::QualifiedName(name), std::move(graph), nullptr);
  if (!is_optimized) function->_set_initial_executor_execution_mode(jit::ExecutorExecutionMode::SIMPLE);
  return ScriptPart(std::move(function));
}

}  // namespace

bool holds_tensors(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  collect(value, tensors);
  return !tensors.empty();
}

std::vector<at::Tensor> ScriptCall::tensors() const {
  std::vector<at::Tensor> found;
  for (const c10::IValue& argument : arguments) collect(argument, found);
  return found;
}

ScriptCall ScriptCall::with_tensors(std::span<const at::Tensor> tensors) const {
  ScriptCall call;
  for (const c10::IValue& argument : arguments) call.arguments.push_back(replaced(argument, tensors));
  return call;
}

bool ScriptCall::is_like(const ScriptCall& other) const {
  return std::equal(arguments.begin(), arguments.end(), other.arguments.begin(), other.arguments.end(), means_the_same);
}

ModuleHandle::ModuleHandle(const jit::Module& module) : module_(std::make_shared<const jit::Module>(module)) {}

c10::IValue ScriptPart::run(const jit::Module* module, const ScriptCall& call, std::span<const at::Tensor> more) const {
  jit::Stack stack;
  if (module != nullptr) stack.emplace_back(module->_ivalue());
  stack.insert(stack.end(), call.arguments.begin(), call.arguments.end());
  stack.insert(stack.end(), more.begin(), more.end());
  function_->run(stack);
  PENSTOCK_ASSERT(stack.size() == 1, "a program returned ", stack.size(), " values");
  return std::move(stack.front());
}

std::vector<std::string> ScriptPart::optimized_operators() const {
  std::vector<std::string> operators;
  jit::GraphFunction* function = jit::tryToGraphFunction(*function_);
  if (function == nullptr) return operators;
  try {
    const jit::GraphExecutorState state = function->getDebugState();
    for (const auto& [key, plan] : state.execution_plans) describe(plan.graph->block(), false, operators);
  } catch (const c10::Error&) {
    return {};  // not optimized yet: torch has no other indication
  }
  std::sort(operators.begin(), operators.end());
  return operators;
}

struct ScriptProgram::Impl {
  ReadProgram read;
};

ScriptProgram::ScriptProgram(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ScriptProgram::~ScriptProgram() = default;
ScriptProgram::ScriptProgram(ScriptProgram&&) noexcept = default;
ScriptProgram& ScriptProgram::operator=(ScriptProgram&&) noexcept = default;

Result<ScriptProgram> ScriptProgram::read(const jit::Module& module, const ScriptCall& call,
                                          std::span<const std::optional<uint32_t>> leaf_indices) {
  const auto method = module.find_method("forward");
  if (!method) return Fault{Errc::kUnsupported, "the TorchScript module has no forward"};
  auto read = read_program(*method->graph(), &module, call, leaf_indices);
  if (!read) return read.error();
  return ScriptProgram(std::make_unique<Impl>(Impl{std::move(read).value()}));
}

Result<ScriptProgram> ScriptProgram::read(jit::Function& function, const ScriptCall& call,
                                          std::span<const std::optional<uint32_t>> leaf_indices) {
  if (!function.isGraphFunction()) return Fault{Errc::kUnsupported, "the TorchScript function has no graph"};
  auto read = read_program(*jit::toGraphFunction(function).graph(), nullptr, call, leaf_indices);
  if (!read) return read.error();
  return ScriptProgram(std::make_unique<Impl>(Impl{std::move(read).value()}));
}

const graph::Graph& ScriptProgram::graph() const { return impl_->read.captured.graph; }

const std::vector<at::Tensor>& ScriptProgram::constants() const { return impl_->read.captured.constants; }

bool ScriptProgram::holds() const { return impl_->read.attributes.hold(); }

std::vector<graph::ValueId> ScriptProgram::made_by_workers(const graph::Plan& plan) const {
  std::vector<graph::ValueId> made;
  for (const graph::PlanGroup& group : plan.moved)
    for (const uint32_t node : group.nodes) {
      const auto& results = graph().nodes[node].results;
      made.insert(made.end(), results.begin(), results.end());
    }
  return made;
}

bool ScriptProgram::is_optimized_alike(const graph::Plan& plan, const ScriptPart& whole, const ScriptPart& part) const {
  const std::set<std::string> own = impl_->read.written.lines();
  const std::set<std::string> moved = impl_->read.written.lines(made_by_workers(plan));
  std::vector<std::string> expected = whole.optimized_operators();
  std::vector<std::string> present = part.optimized_operators();
  std::erase_if(expected, [&](const std::string& place) { return moved.contains(line_of(place)); });
  // Autograd's formula for a conversion, at places inside torch: a branch, and the conversion, which gives the same
  // bits.
  const auto converts = [&](const std::string& place) {
    return (place.starts_with("aten::to ") || place.starts_with("prim::If ")) && !own.contains(line_of(place));
  };
  std::erase_if(expected, converts);
  std::erase_if(present, converts);
  return expected == present;
}

Result<ScriptPart> ScriptProgram::suffix(const graph::Plan& plan, bool is_optimized) const {
  auto part = impl_->read.written.without(plan.boundary, made_by_workers(plan));
  if (!part) return part.error();
  return part_of("penstock_suffix", std::move(part).value(), is_optimized);
}

Result<ScriptPart> ScriptProgram::computing(const std::vector<graph::ValueId>& values) const {
  auto part = impl_->read.written.computing(values);
  if (!part) return part.error();
  return part_of("penstock_reference", std::move(part).value(), false);
}

ScriptPart whole_program(const jit::Module& module) {
  jit::Function& function = module.get_method("forward").function();
  // The module's type owns the function, and lives as long as the module.
  return ScriptPart(std::shared_ptr<jit::Function>(&function, [](jit::Function*) {}));
}

ScriptPart whole_program(jit::Function& function) {
  return ScriptPart(std::shared_ptr<jit::Function>(&function, [](jit::Function*) {}));
}

std::string content_digest(const at::Tensor& tensor) {
  PENSTOCK_ASSERT(tensor.is_cpu(), "the digest of a tensor on ", tensor.device().str());
  const c10::AutoGradMode no_grad(false);
  // Two tensors with equal elements have equal digests, independent of their memory layouts.
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
  graph::Sha256 hash;
  std::string head = std::string(c10::toString(plain.scalar_type())) + " [";
  for (const int64_t size : plain.sizes()) head += std::to_string(size) + ",";
  hash.update(head + "]\n");
  hash.update(std::span(static_cast<const std::byte*>(plain.const_data_ptr()), plain.nbytes()));
  return graph::short_digest(hash);
}

}  // namespace penstock::capture
