// SPDX-License-Identifier: Apache-2.0
#include "capture/builder.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/result.h"
#include "capture/schema.h"
#include "graph/effects.h"
#include "graph/ir_text.h"

namespace penstock::capture {
namespace {

enum class Rule : uint8_t { kSame, kOneMore, kOneLess, kOfList };

struct RankRule {
  std::string_view op;  // of aten, without overload
  Rule rule;
};

// Operators that are not pointwise, with a rule for the rank of their first operand. `kOfList`: the second operand is a
// list with one size per dimension.
constexpr std::array<RankRule, 48> kRules = {{
    {"to", Rule::kSame},
    {"contiguous", Rule::kSame},
    {"clone", Rule::kSame},
    {"detach", Rule::kSame},
    {"type_as", Rule::kSame},
    {"zeros_like", Rule::kSame},
    {"ones_like", Rule::kSame},
    {"full_like", Rule::kSame},
    {"permute", Rule::kSame},
    {"transpose", Rule::kSame},
    {"flip", Rule::kSame},
    {"roll", Rule::kSame},
    {"slice", Rule::kSame},
    {"narrow", Rule::kSame},
    {"pad", Rule::kSame},
    {"constant_pad_nd", Rule::kSame},
    {"reflection_pad1d", Rule::kSame},
    {"reflection_pad2d", Rule::kSame},
    {"replication_pad2d", Rule::kSame},
    {"cumsum", Rule::kSame},
    {"softmax", Rule::kSame},
    {"log_softmax", Rule::kSame},
    {"layer_norm", Rule::kSame},
    {"batch_norm", Rule::kSame},
    {"instance_norm", Rule::kSame},
    {"group_norm", Rule::kSame},
    {"linear", Rule::kSame},
    {"conv1d", Rule::kSame},
    {"conv2d", Rule::kSame},
    {"conv3d", Rule::kSame},
    {"avg_pool2d", Rule::kSame},
    {"max_pool2d", Rule::kSame},
    {"adaptive_avg_pool2d", Rule::kSame},
    {"upsample_nearest1d", Rule::kSame},
    {"upsample_nearest2d", Rule::kSame},
    {"upsample_nearest3d", Rule::kSame},
    {"_upsample_nearest_exact1d", Rule::kSame},
    {"_upsample_nearest_exact2d", Rule::kSame},
    {"upsample_linear1d", Rule::kSame},
    {"upsample_bilinear2d", Rule::kSame},
    {"upsample_bicubic2d", Rule::kSame},
    {"_upsample_bilinear2d_aa", Rule::kSame},
    {"_upsample_bicubic2d_aa", Rule::kSame},
    {"unsqueeze", Rule::kOneMore},
    {"select", Rule::kOneLess},
    {"view", Rule::kOfList},
    {"reshape", Rule::kOfList},
    {"expand", Rule::kOfList},
}};

constexpr std::string_view kAten = "aten::";

std::string_view without_overload(std::string_view op) {
  op.remove_prefix(kAten.size());
  return op.substr(0, op.find('.'));
}

// Whether the operator returns a number, which broadcasts with anything.
bool is_number(std::string_view op) {
  return (op.starts_with("size::") && op != "size::sizes") || op == "aten::sym_size.int" || op == "aten::item";
}

}  // namespace

std::optional<size_t> Ranks::find(graph::ValueId value) const {
  const auto found = ranks_.find(value);
  return found == ranks_.end() ? std::nullopt : std::optional(found->second);
}

void Ranks::note_call(const graph::Node& call) {
  if (is_number(call.op)) return set(call.results.front(), 0);
  if (call.op.starts_with("torchscript::")) return ranks_.clear();  // it writes the tensors that it reads
  if (!call.op.starts_with(kAten)) return;
  const auto op = find_operator(call.op);
  if (!op) return;
  const bool is_pointwise = op->hasTag(at::Tag::pointwise);
  if (op->hasTag(at::Tag::inplace_view) || (op->schema().is_mutable() && !is_pointwise)) return ranks_.clear();
  if (call.results.size() != 1 || call.args.empty()) return;
  std::optional<size_t> rank;
  if (is_pointwise) {
    rank = broadcast_rank(call);
  } else {
    const auto found = std::find_if(kRules.begin(), kRules.end(),
                                    [&](const RankRule& rule) { return rule.op == without_overload(call.op); });
    const std::optional<size_t> of_first = rank_of(call.args.front());
    if (found == kRules.end() || !of_first) return;
    switch (found->rule) {
      case Rule::kSame: rank = of_first; break;
      case Rule::kOneMore: rank = *of_first + 1; break;
      case Rule::kOneLess:
        if (*of_first > 0) rank = *of_first - 1;
        break;
      case Rule::kOfList:
        if (call.args.size() > 1)
          if (const auto* sizes = call.args[1].get<graph::Argument::List>()) rank = sizes->size();
        break;
    }
  }
  if (rank) set(call.results.front(), *rank);
}

std::optional<size_t> Ranks::rank_of(const graph::Argument& argument) const {
  const auto* value = argument.get<graph::ValueRef>();
  return value == nullptr ? std::nullopt : find(value->id);
}

std::optional<size_t> Ranks::broadcast_rank(const graph::Node& call) const {
  size_t most = 0;
  const auto take = [&](const graph::Argument& argument) {
    if (argument.get<graph::Argument::List>() != nullptr) return false;
    if (argument.get<graph::ValueRef>() == nullptr) return true;  // a number, a dtype
    const std::optional<size_t> rank = rank_of(argument);
    most = std::max(most, rank.value_or(0));
    return rank.has_value();
  };
  for (const graph::Argument& argument : call.args)
    if (!take(argument)) return std::nullopt;
  for (const auto& named : call.kwargs)
    if (!take(named.value)) return std::nullopt;
  return most;
}

Bound Bound::of_argument(graph::Argument argument) {
  Bound bound;
  bound.argument = std::move(argument);
  return bound;
}

Bound Bound::of_number(const graph::Number& number) {
  return std::visit(
      [](auto value) {
        if constexpr (std::is_same_v<decltype(value), double>) return of_argument({graph::Real(value)});
        if constexpr (!std::is_same_v<decltype(value), double>) return of_argument({value});
      },
      number);
}

Bound Bound::of_object(c10::IValue object, std::string path) {
  Bound bound;
  bound.kind = Kind::kObject;
  bound.object = std::move(object);
  bound.path = std::move(path);
  return bound;
}

Bound Bound::of_tuple(std::vector<Bound> items) {
  Bound bound;
  bound.kind = Kind::kTuple;
  bound.items = std::move(items);
  return bound;
}

Bound Bound::of_list(std::vector<Bound> items) {
  graph::Argument::List arguments;
  for (const Bound& item : items) {
    if (item.kind != Kind::kArgument || item.is_number_tensor) return of_tuple(std::move(items));
    arguments.push_back(item.argument);
  }
  return of_argument({std::move(arguments)});
}

std::optional<graph::Number> Bound::number() const {
  if (kind != Kind::kArgument) return std::nullopt;
  if (const auto* integer = argument.get<int64_t>()) return graph::Number(*integer);
  if (const auto* real = argument.get<graph::Real>()) return graph::Number(real->value);
  if (const auto* truth = argument.get<bool>()) return graph::Number(*truth);
  return std::nullopt;
}

std::optional<std::vector<Bound>> Bound::elements() const {
  if (kind == Kind::kTuple) return items;
  const auto* arguments = argument.get<graph::Argument::List>();
  if (kind != Kind::kArgument || arguments == nullptr) return std::nullopt;
  std::vector<Bound> elements;
  for (const graph::Argument& item : *arguments) elements.push_back(of_argument(item));
  return elements;
}

namespace {

[[noreturn]] void refuse_program(const std::string& why) {
  throw Refusal{"the TorchScript program cannot be captured: " + why};
}

// "aten::sub at model.py:12:8" from "aten::sub at /home/me/model.py:12:8", which is how TorchScript names a line.
std::string without_folders(const std::string& place) {
  constexpr std::string_view kAt = " at ";
  const size_t at = place.rfind(kAt);
  const size_t folder_end = place.rfind('/');
  if (at == std::string::npos || folder_end == std::string::npos || folder_end < at) return place;
  return place.substr(0, at + kAt.size()) + place.substr(folder_end + 1);
}

}  // namespace

graph::ValueId CaptureBuilder::new_value() {
  return captured_.graph.add_value("v" + std::to_string(captured_.graph.value_names.size()));
}

Bound CaptureBuilder::leaf(const c10::TypePtr& type, const std::string& name) {
  if (type->kind() == c10::TypeKind::TupleType) {
    std::vector<Bound> items;
    for (const c10::TypePtr& item : type->containedTypes()) items.push_back(leaf(item, name));
    return Bound::of_tuple(std::move(items));
  }
  if (without_optional(type)->kind() != c10::TypeKind::TensorType)
    refuse_program("forward takes " + name + " of type " + type->str() +
                   "; only tensors and tuples of tensors can be captured");
  if (taken_count_ >= tensors_given_.size())
    refuse_program("forward takes more tensors than the " + std::to_string(tensors_given_.size()) + " of the batch");
  const std::optional<uint32_t> leaf_index = leaf_indices_[taken_count_];
  const std::string index = std::to_string(taken_count_);
  const at::Tensor& tensor = tensors_given_[taken_count_++];
  if (leaf_index && tensor.requires_grad())
    refuse_program("leaf " + index + " of the batch requires grad; a gradient cannot flow back through a worker");
  graph::Input input = tensor_input(tensor, leaf_index ? "leaf " + index : name);
  // Every size is free: the program reads the sizes it needs, and the others may differ.
  for (size_t dim = 0; dim < input.sizes.size(); ++dim) input.sizes[dim] = "s" + index + "_" + std::to_string(dim);
  if (leaf_index) {
    input.leaf_index = *leaf_index;
  } else {
    input.kind = graph::InputKind::kState;
    input.source = name.substr(0, graph::kQuotedBytesMax);
    captured_.constants.push_back(tensor);
  }
  captured_.graph.inputs.push_back(input);
  return Bound::of_argument({graph::ValueRef{input.value}});
}

graph::Input CaptureBuilder::tensor_input(const at::Tensor& tensor, const std::string& source) {
  const auto dtype = dtype_from_torch(tensor.scalar_type());
  if (!dtype || tensor.layout() != c10::Layout::Strided)
    refuse_program(source + " is a " + tensor.toString() + " tensor, which the graph cannot represent");
  graph::Input input;
  input.dtype = *dtype;
  for (const int64_t size : tensor.sizes()) input.sizes.emplace_back(size);
  input.value = new_value();
  ranks_.set(input.value, static_cast<size_t>(tensor.dim()));
  devices_.emplace(input.value, device_from_torch(tensor.device()));
  return input;
}

Bound CaptureBuilder::constant(const at::Tensor& tensor, const std::string& source) {
  const auto met = tensors_.find(tensor.unsafeGetTensorImpl());
  if (met != tensors_.end()) return Bound::of_argument({graph::ValueRef{met->second}});
  graph::Input input = tensor_input(tensor, source);
  input.kind = tensor.requires_grad() ? graph::InputKind::kState : graph::InputKind::kConst;
  input.source = source.substr(0, graph::kQuotedBytesMax);
  captured_.graph.inputs.push_back(input);
  captured_.constants.push_back(tensor);
  tensors_.emplace(tensor.unsafeGetTensorImpl(), input.value);
  return Bound::of_argument({graph::ValueRef{input.value}});
}

Bound CaptureBuilder::known(const c10::IValue& value, const std::string& path) {
  if (value.isNone()) return Bound::of_argument({graph::None{}});
  if (value.isTensor()) {
    if (!value.toTensor().defined()) return Bound::of_argument({graph::None{}});
    return constant(value.toTensor(), path);
  }
  if (value.isBool()) return Bound::of_number(value.toBool());
  if (value.isInt()) return Bound::of_number(value.toInt());
  if (value.isDouble()) return Bound::of_number(value.toDouble());
  if (value.isString()) return Bound::of_argument({value.toStringRef()});
  if (value.isDevice()) return Bound::of_argument({device_from_torch(value.toDevice())});
  if (value.isTuple() || value.isList()) {
    const auto elements = value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    std::vector<Bound> items;
    for (size_t i = 0; i < elements.size(); ++i)
      items.push_back(known(elements[i], path + "[" + std::to_string(i) + "]"));
    return value.isTuple() ? Bound::of_tuple(std::move(items)) : Bound::of_list(std::move(items));
  }
  // A value that is never used does no harm; the use of one is refused where it occurs.
  return Bound::of_object(value, path);
}

std::optional<size_t> CaptureBuilder::rank_of(const Bound& bound) const {
  const graph::ValueRef* value = bound.value();
  return value == nullptr ? std::nullopt : ranks_.find(value->id);
}

std::optional<graph::Device> CaptureBuilder::device_of(const Bound& bound) const {
  const graph::ValueRef* value = bound.value();
  if (value == nullptr) return std::nullopt;
  const auto found = devices_.find(value->id);
  return found == devices_.end() ? std::nullopt : std::optional(found->second);
}

bool CaptureBuilder::may_be_none(const Bound& bound) const {
  const graph::ValueRef* value = bound.value();
  if (value == nullptr) return false;
  for (const graph::Node& node : captured_.graph.nodes)
    if (std::find(node.results.begin(), node.results.end(), value->id) != node.results.end())
      return node.op.starts_with("torchscript::") || node.op.starts_with("opaque_view::") || node.op == "list::get";
  return false;
}

std::vector<Bound> CaptureBuilder::append(graph::Node node, size_t result_count, const std::string& place) {
  graph::Graph& graph = captured_.graph;
  if (graph.nodes.size() >= graph::kNodesMax)
    refuse_program(place + " exceeds the maximum number of operations of a graph, " + std::to_string(graph::kNodesMax));
  node.group = static_cast<uint32_t>(graph.nodes.size());
  node.label = without_folders(place).substr(0, graph::kQuotedBytesMax);
  if (const size_t at = node.label.rfind(" at "); at != std::string::npos) node.place = node.label.substr(at + 4);
  std::vector<Bound> results;
  for (size_t i = 0; i < result_count; ++i) {
    node.results.push_back(new_value());
    results.push_back(Bound::of_argument({graph::ValueRef{node.results.back()}}));
  }
  ranks_.note_call(node);
  graph.nodes.push_back(std::move(node));
  return results;
}

Bound CaptureBuilder::emit(std::string op, std::vector<graph::Argument> arguments, const std::string& place) {
  graph::Node node;
  node.op = std::move(op);
  node.args = std::move(arguments);
  return append(std::move(node), 1, place).front();
}

void CaptureBuilder::add_output(const Bound& bound) {
  if (const auto items = bound.elements())
    for (const Bound& item : *items) add_output(item);
  if (const graph::ValueRef* value = bound.value()) captured_.graph.outputs.push_back({value->id, {}});
}

Captured CaptureBuilder::finish() {
  if (taken_count_ != tensors_given_.size())
    refuse_program("forward takes " + std::to_string(taken_count_) + " tensors, but the batch has " +
                   std::to_string(tensors_given_.size()));
  annotate(captured_.graph);
  convert_written_to_state();
  return std::move(captured_);
}

void CaptureBuilder::convert_written_to_state() {
  graph::Graph& graph = captured_.graph;
  graph::AliasSets aliases(graph.value_names.size());
  std::vector<bool> is_written(graph.value_names.size());
  for (const graph::Traits& traits : graph.traits)
    for (const auto& [result, operand] : traits.aliases) aliases.unite(result, operand);
  for (const graph::Traits& traits : graph.traits)
    for (const graph::ValueId value : traits.writes) is_written[aliases.find(value)] = true;
  size_t constant_index = 0;
  for (graph::Input& input : graph.inputs) {
    if (input.kind == graph::InputKind::kLeaf) continue;
    const at::Tensor& tensor = captured_.constants[constant_index++];
    if (input.kind != graph::InputKind::kConst) continue;
    if (is_written[aliases.find(input.value)] || tensor.is_meta())
      input.kind = graph::InputKind::kState;
    else
      input.digest = content_digest(tensor.cpu());
  }
}

namespace {

namespace jit = torch::jit;

void add_values(const Bound& bound, std::vector<graph::Argument>& operands) {
  if (const auto items = bound.elements()) {
    for (const Bound& item : *items) add_values(item, operands);
  } else if (bound.value() != nullptr) {
    operands.push_back(bound.argument);
  }
}

}  // namespace

std::string where(const jit::Node* node) {
  if (const auto place = node->sourceRange().file_line_col())
    return std::string(node->kind().toQualString()) + " at " + std::get<0>(*place) + ":" +
           std::to_string(std::get<1>(*place));
  return node->kind().toQualString();
}

[[noreturn]] void refuse(const jit::Node* node, const std::string& why) {
  throw Refusal{"the TorchScript program cannot be captured: " + where(node) + " " + why};
}

const Bound& ProgramValues::lookup(const jit::Value* value) const {
  const Bound* found = find(value);
  PENSTOCK_ASSERT(found != nullptr, "%", value->debugName(), " is read before it is created");
  return *found;
}

const Bound* ProgramValues::find(const jit::Value* value) const {
  const auto found = bounds_.find(value);
  return found == bounds_.end() ? nullptr : &found->second;
}

std::vector<Bound> ProgramValues::inputs_of(const jit::Node* node) const {
  std::vector<Bound> bounds;
  for (const jit::Value* input : node->inputs()) bounds.push_back(lookup(input));
  return bounds;
}

std::vector<graph::Argument> ProgramValues::of_graph(const std::vector<const jit::Value*>& values) const {
  std::vector<graph::Argument> operands;
  for (const jit::Value* value : values)
    if (const Bound* bound = find(value)) add_values(*bound, operands);
  return operands;
}

void ProgramValues::bind(const jit::Value* value, Bound bound) { bounds_[value] = std::move(bound); }

void ProgramValues::bind_call(const jit::Node* node, graph::Node call) {
  const auto results = builder_.append(std::move(call), node->outputs().size(), where(node));
  for (size_t i = 0; i < results.size(); ++i) bind(node->outputs()[i], results[i]);
}

Bound ProgramValues::emit(const jit::Node* node, std::string op, std::vector<graph::Argument> arguments) {
  return builder_.emit(std::move(op), std::move(arguments), where(node));
}

}  // namespace penstock::capture
