// SPDX-License-Identifier: Apache-2.0
#include "runtime/executor.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/result.h"
#include "capture/capture.h"
#include "capture/schema.h"
#include "graph/call_flow.h"
#include "graph/effects.h"
#include "graph/ir_text.h"
#include "runtime/kernel_families.h"
#include "runtime/kernel_settings.h"

namespace penstock::runtime {
namespace {

using graph::ValueId;

// Returns, by node, whether its results are the same for every batch and do not share memory with an output.
std::vector<bool> foldable_nodes(const graph::Graph& graph) {
  graph::AliasSets aliases(graph.value_names.size());
  for (const graph::Traits& traits : graph.traits)
    for (const auto& [result, operand] : traits.aliases) aliases.unite(result, operand);
  std::vector<bool> is_given_out(graph.value_names.size());  // by alias set
  for (const graph::Output& output : graph.outputs) is_given_out[aliases.find(output.value)] = true;

  const auto verdicts = graph::analyse_effects(graph, {.is_whole_program = false});
  std::vector<bool> is_foldable(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const auto& results = graph.nodes[i].results;
    is_foldable[i] = verdicts[i].movable && verdicts[i].level == graph::Level::kConst &&
                     std::none_of(results.begin(), results.end(),
                                  [&](ValueId result) { return is_given_out[aliases.find(result)]; });
  }
  return is_foldable;
}

// Counts the memory of values once, however many views of it there are.
class StorageBytes {
 public:
  size_t add(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    size_t bytes = 0;
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) bytes += add_tensor(tensor);
    return bytes;
  }

 private:
  size_t add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return 0;
    return seen_.insert(tensor.storage().unsafeGetStorageImpl()).second ? tensor.storage().nbytes() : 0;
  }

  std::unordered_set<const c10::StorageImpl*> seen_;
};

}  // namespace

Folding fold_constants(const graph::Graph& graph, std::span<const OperatorCall> calls, const Frame& constants,
                       size_t bytes_max) {
  const ExecutionGuard guard;
  Folding folding{constants, foldable_nodes(graph), 0, KernelSettings::now()};
  StorageBytes storages;
  for (const c10::IValue& constant : constants) storages.add(constant);
  std::vector<bool> is_missing(constants.size());  // would be constant, but was not folded
  size_t folded_bytes = 0;
  bool is_full = false;
  c10::Stack stack;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const graph::Node& node = graph.nodes[i];
    bool is_ready = folding.is_folded[i] && !is_full;
    graph::for_each_operand(node, [&](ValueId operand) { is_ready = is_ready && !is_missing[operand]; });
    if (is_ready && calls[i].run(folding.start, stack)) {
      for (const ValueId result : node.results) folded_bytes += storages.add(folding.start[result]);
      is_full = folded_bytes > bytes_max;
      if (!is_full) {
        ++folding.node_count;
        continue;
      }
    }
    folding.is_folded[i] = false;
    for (const ValueId result : node.results) {
      folding.start[result] = c10::IValue();
      is_missing[result] = true;
    }
  }
  // Values that only folded nodes read are no longer needed.
  std::vector<bool> is_read(constants.size());
  for (const graph::Output& output : graph.outputs) is_read[output.value] = true;
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    if (!folding.is_folded[i])
      graph::for_each_operand(graph.nodes[i], [&](ValueId operand) { is_read[operand] = true; });
  for (size_t value = 0; value < constants.size(); ++value)
    if (!is_read[value]) folding.start[value] = c10::IValue();
  return folding;
}

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
        calls_[i].allow_write_over_operand();
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

Result<PrefixRest> PrefixRest::create(std::string_view text, std::vector<at::Tensor> constants) {
  auto graph = graph::parse_graph(text);
  if (!graph) return graph.error();
  PrefixRest rest;
  rest.prefix_ = std::move(graph).value();
  rest.constants_ = std::move(constants);
  capture::annotate(rest.prefix_);
  std::vector<bool> is_exact;
  for (const NumericFamily family : kernel_families(rest.prefix_))
    is_exact.push_back(family == NumericFamily::kArithmetic);
  rest.split_ = graph::split_prefix(rest.prefix_, is_exact);
  if (rest.split_.handed_over.empty())
    return Fault{Errc::kUnsupported, "no operator of the prefix returns the same bits on all CPUs"};
  return rest;
}

Result<void> PrefixRest::prepare(size_t leaf_count, std::vector<graph::GivenForm> forms) {
  if (executor_ && leaf_count == leaf_count_ && forms == forms_) return {};
  executor_.reset();
  auto part = graph::rest_of(prefix_, split_, forms, static_cast<uint32_t>(leaf_count));
  if (!part) return part.error();
  std::vector<at::Tensor> constants;
  for (const size_t index : graph::constants_of(part.value(), prefix_)) constants.push_back(constants_.at(index));
  auto executor = Executor::create(std::move(part).value(), std::move(constants));
  if (!executor) return executor.error();
  executor_.emplace(std::move(executor).value());
  leaf_count_ = leaf_count;
  forms_ = std::move(forms);
  return {};
}

Result<std::vector<at::Tensor>> PrefixRest::run(std::span<const at::Tensor> leaves, std::vector<at::Tensor> given) {
  if (given.size() != split_.handed_over.size())
    return Fault{Errc::kMismatch, "a worker sent " + std::to_string(given.size()) + " values instead of " +
                                      std::to_string(split_.handed_over.size())};
  std::vector<graph::GivenForm> forms;
  for (const at::Tensor& tensor : given) {
    const auto dtype = capture::dtype_from_torch(tensor.scalar_type());
    if (!dtype) return Fault{Errc::kUnsupported, "a value of " + tensor.toString() + " was sent"};
    forms.push_back({.dtype = *dtype, .rank = static_cast<uint32_t>(tensor.dim())});
  }
  if (auto prepared = prepare(leaves.size(), std::move(forms)); !prepared) return prepared.error();
  std::vector<at::Tensor> all(leaves.begin(), leaves.end());
  all.insert(all.end(), given.begin(), given.end());
  auto computed = executor_->run(all);
  if (!computed) return computed.error();
  std::vector<at::Tensor> outputs;
  size_t computed_index = 0;
  for (const graph::Output& output : prefix_.outputs) {
    const auto found = std::ranges::find(split_.handed_over, output.value);
    outputs.push_back(found == split_.handed_over.end()
                          ? computed.value().at(computed_index++)
                          : given[static_cast<size_t>(found - split_.handed_over.begin())]);
  }
  return outputs;
}

}  // namespace penstock::runtime
