// SPDX-License-Identifier: Apache-2.0
#include "runtime/executor.h"

#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <unordered_map>

#include "base/assert.h"
#include "capture/capture.h"
#include "capture/types.h"
#include "graph/effects.h"
#include "graph/ir_text.h"
#include "graph/repetitions.h"
#include "runtime/execution_guard.h"
#include "runtime/last_uses.h"
#include "runtime/seeded_draws.h"

namespace penstock::runtime {
namespace {

using graph::Input;
using graph::InputKind;
using graph::ValueId;

Fault refusal(const std::string& what, const std::string& seen, const std::string& expected) {
  return {Errc::kMismatch, what + " is " + seen + ", but the graph was captured with " + expected + "; capture again"};
}

std::string describe_input(const Input& input) {
  std::string text = std::string(name_of(input.dtype)) + " [";
  for (size_t i = 0; i < input.sizes.size(); ++i) {
    if (i > 0) text += ", ";
    if (const auto* size = std::get_if<int64_t>(&input.sizes[i]))
      text += std::to_string(*size);
    else
      text += std::get<std::string>(input.sizes[i]);
  }
  return text + "]";
}

}  // namespace

Result<void> check_constant(const Input& input, const at::Tensor& tensor) {
  const std::string what = "the constant " + input.source;
  if (!tensor.defined()) return refusal(what, "not there", describe_input(input));
  bool fits = tensor.scalar_type() == capture::to_torch(input.dtype) &&
              static_cast<size_t>(tensor.dim()) == input.sizes.size() && tensor.layout() == c10::Layout::Strided;
  for (size_t dim = 0; fits && dim < input.sizes.size(); ++dim)
    fits = tensor.size(static_cast<int64_t>(dim)) == std::get<int64_t>(input.sizes[dim]);
  if (!fits) return refusal(what, describe_value(tensor), describe_input(input));
  if (input.kind == InputKind::kState) return {};
  if (!tensor.is_cpu()) return refusal(what, "on " + tensor.device().str(), "it on the CPU");
  if (!input.digest.empty() && capture::content_digest(tensor) != input.digest)
    return refusal(what, "of different content", "the digest " + input.digest);
  return {};
}

Result<Executor> Executor::create(graph::Graph graph, std::vector<at::Tensor> constants,
                                  const ExecutorOptions& options) {
  Executor executor;
  executor.graph_ = std::move(graph);
  if (auto prepared = executor.prepare(std::move(constants), options); !prepared) return prepared.error();
  return executor;
}

Result<void> Executor::prepare(std::vector<at::Tensor> constants, const ExecutorOptions& options) {
  // Factories and integer divisions use the default dtype if the program specifies none.
  if (c10::get_default_dtype() != caffe2::TypeMeta::Make<float>())
    return Fault{Errc::kUnsupported, "the default dtype is " + std::string(c10::get_default_dtype().name()) +
                                         ", but graphs run with float32; do not change torch.set_default_dtype here"};
  capture::annotate(graph_);
  if (auto checked = check_effects(options); !checked) return checked;
  if (auto bound = bind_inputs(std::move(constants)); !bound) return bound;
  draws_ =
      std::ranges::any_of(graph_.traits, [](const graph::Traits& t) { return t.purity == graph::Purity::kRandom; });

  // A whole graph may change its inputs, and a graph without outputs is not worth optimising.
  const bool is_pure = !options.allow_state && !graph_.outputs.empty();
  const graph::Graph program = is_pure ? graph::without_repetitions(graph_) : graph_;
  for (const graph::Node& node : program.nodes) {
    auto call = OperatorCall::prepare(node);
    if (!call) return call.error();
    calls_.push_back(std::move(call).value());
  }
  last_uses_ = last_uses(program);
  for (const graph::Output& output : program.outputs) outputs_.push_back(output.value);
  if (is_pure) {
    folding_ = fold_constants(program, calls_, start_);
    for (size_t i = 0; i < program.nodes.size(); ++i) {
      const auto& args = program.nodes[i].args;
      const auto* operand = args.empty() ? nullptr : args[0].get<graph::ValueRef>();
      if (operand != nullptr && std::ranges::find(last_uses_[i], operand->id) != last_uses_[i].end())
        calls_[i].let_write_over_operand();
    }
  }
  return {};
}

Result<void> Executor::bind_inputs(std::vector<at::Tensor> constants) {
  start_.resize(graph_.value_names.size());
  size_t constant_index = 0;
  std::unordered_map<std::string, int64_t> symbols;
  for (size_t i = 0; i < graph_.inputs.size(); ++i) {
    const Input& input = graph_.inputs[i];
    if (input.kind == InputKind::kInt) continue;
    if (input.kind == InputKind::kLeaf) {
      LeafShape leaf{i, {}};
      for (const graph::Dim& dim : input.sizes) {
        const auto* symbol = std::get_if<std::string>(&dim);
        const auto next = static_cast<int64_t>(symbols.size());
        leaf.symbols.push_back(symbol == nullptr ? -1 : symbols.try_emplace(*symbol, next).first->second);
      }
      leaves_.push_back(std::move(leaf));
      continue;
    }
    if (constant_index >= constants.size())
      return refusal("the number of constants", std::to_string(constants.size()), "more of them");
    if (auto checked = check_constant(input, constants[constant_index]); !checked) return checked;
    start_[input.value] = std::move(constants[constant_index++]);
  }
  symbol_count_ = symbols.size();
  if (constant_index != constants.size())
    return refusal("the number of constants", std::to_string(constants.size()), std::to_string(constant_index));
  return {};
}

Result<void> Executor::check_effects(const ExecutorOptions& options) const {
  for (const Input& input : graph_.inputs) {
    if (input.kind == InputKind::kInt && !input.size_of)
      return Fault{Errc::kUnsupported, "the graph reads " + input.source + ", a number from outside the batch"};
    if (input.kind == InputKind::kState && !options.allow_state)
      return Fault{Errc::kUnsupported,
                   "the graph reads " + input.source + ", which is state; a prefix must not have state"};
  }
  if (options.allow_state) return {};
  const auto verdicts =
      graph::analyse_effects(graph_, {.allow_random = options.allow_random, .is_whole_program = false});
  for (size_t i = 0; i < verdicts.size(); ++i)
    if (!verdicts[i].movable)
      return Fault{Errc::kUnsupported,
                   "a worker does not run " + graph::describe(graph_.nodes[i]) + ": " + verdicts[i].reason};
  return {};
}

Result<void> Executor::check_leaf(const LeafShape& leaf, const at::Tensor& tensor, std::span<int64_t> symbols) const {
  const Input& input = graph_.inputs[leaf.input_index];
  const auto refuse = [&](const std::string& seen) {
    return refusal("leaf " + std::to_string(input.leaf_index) + " of the batch", seen, describe_input(input));
  };
  if (!tensor.defined()) return refuse("not there");
  if (!tensor.is_cpu() || tensor.layout() != c10::Layout::Strided || tensor.is_quantized())
    return refuse("a " + tensor.toString() + " tensor");
  if (tensor.key_set().has(c10::DispatchKey::Python)) return refuse("an object that replaces torch's operators");
  if (tensor.requires_grad()) return refuse("a tensor that requires grad");
  if (tensor.scalar_type() != capture::to_torch(input.dtype) ||
      static_cast<size_t>(tensor.dim()) != leaf.symbols.size())
    return refuse(describe_value(tensor));
  for (size_t dim = 0; dim < leaf.symbols.size(); ++dim) {
    const int64_t size = tensor.size(static_cast<int64_t>(dim));
    if (leaf.symbols[dim] < 0) {
      if (size != std::get<int64_t>(input.sizes[dim])) return refuse(describe_value(tensor));
      continue;
    }
    int64_t& bound = symbols[static_cast<size_t>(leaf.symbols[dim])];
    if (bound >= 0 && bound != size)
      return refuse(describe_value(tensor) + " with " + std::get<std::string>(input.sizes[dim]) + " already " +
                    std::to_string(bound));
    bound = size;
  }
  return {};
}

Result<void> Executor::accepts(std::span<const at::Tensor> leaves) const {
  std::vector<int64_t> symbols(symbol_count_, -1);
  for (const LeafShape& leaf : leaves_) {
    const uint32_t index = graph_.inputs[leaf.input_index].leaf_index;
    const at::Tensor missing;
    if (auto checked = check_leaf(leaf, index < leaves.size() ? leaves[index] : missing, symbols); !checked)
      return checked;
  }
  return {};
}

Result<std::vector<at::Tensor>> Executor::run(std::span<const at::Tensor> leaves, std::optional<uint64_t> seed) const {
  if (auto accepted = accepts(leaves); !accepted) return accepted.error();
  const ExecutionGuard guard;
  std::optional<GeneratorGuard> generator;
  if (draws_ && seed) generator.emplace(*seed);
  const bool is_folded = folding_.holds_now();
  Frame frame = is_folded ? folding_.start : start_;
  for (const Input& input : graph_.inputs)
    if (input.kind == InputKind::kLeaf) frame[input.value] = leaves[input.leaf_index];
  for (const Input& input : graph_.inputs)
    if (input.size_of) frame[input.value] = frame[input.size_of->tensor].toTensor().size(input.size_of->dim);
  c10::Stack stack;
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (is_folded && folding_.is_folded[i]) continue;
    if (auto ran = calls_[i].run(frame, stack); !ran) return ran.error();
    for (const ValueId value : last_uses_[i]) frame[value] = c10::IValue();
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const ValueId output : outputs_) {
    const c10::IValue& value = frame[output];
    if (!value.isTensor())
      return Fault{Errc::kUnsupported, "the output %" + graph_.value_names[output] + " is a " + value.tagKind() +
                                           "; only tensors can be outputs"};
    outputs.push_back(value.toTensor());
  }
  return outputs;
}

}  // namespace penstock::runtime
