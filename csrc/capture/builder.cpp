// SPDX-License-Identifier: Apache-2.0
#include "capture/builder.h"

#include <algorithm>
#include <string_view>

#include "capture/devices.h"
#include "capture/optional.h"
#include "capture/types.h"
#include "graph/alias_sets.h"
#include "graph/ir_text.h"

namespace penstock::capture {
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
  turn_written_into_state();
  return std::move(captured_);
}

void CaptureBuilder::turn_written_into_state() {
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

}  // namespace penstock::capture
