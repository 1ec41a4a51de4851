// SPDX-License-Identifier: Apache-2.0
#include "runtime/placement.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "capture/capture.h"
#include "capture/schema.h"
#include "graph/device_bits.h"
#include "graph/effects.h"
#include "graph/size_ops.h"
#include "runtime/kernel_settings.h"
#include "runtime/operator_call.h"

namespace penstock::runtime {
namespace {

using graph::Node;
using graph::ValueId;

// The device always has an index.
std::optional<c10::Device> device_of(const graph::Device& name) {
  std::optional<c10::Device> device = capture::accelerator_of(name);
  if (device && !device->has_index()) device = c10::impl::VirtualGuardImpl(device->type()).getDevice();
  return device;
}

at::Tensor without_values(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return {};
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

template <typename T>
const T* literal_of(const graph::Argument* argument) {
  return argument == nullptr ? nullptr : argument->get<T>();
}

class Placement {
 public:
  Placement(const graph::Graph& graph, std::span<const at::Tensor> leaves, std::span<const at::Tensor> constants)
      : placed_{.graph = graph, .devices = std::vector<std::optional<c10::Device>>(graph.value_names.size())},
        frame_(graph.value_names.size()) {
    size_t constant = 0;
    for (const graph::Input& input : graph.inputs) {
      if (input.kind == graph::InputKind::kLeaf && input.leaf_index < leaves.size())
        put(input.value, leaves[input.leaf_index]);
      const bool is_held = input.kind == graph::InputKind::kConst || input.kind == graph::InputKind::kState;
      if (!is_held || constant >= constants.size()) continue;
      put(input.value, constants[constant++]);
      if (input.kind == graph::InputKind::kState) frame_[input.value] = c10::IValue();  // only its device is known
    }
    for (const graph::Input& input : graph.inputs) {
      if (!input.size_of || !frame_[input.size_of->tensor].isTensor()) continue;
      frame_[input.value] = frame_[input.size_of->tensor].toTensor().size(input.size_of->dim);
    }
  }

  PlacedGraph place() {
    const ExecutionGuard execution;
    const GeneratorGuard generator;
    const graph::Graph on_cpu = all_on_cpu(placed_.graph);
    for (size_t index = 0; index < placed_.graph.nodes.size(); ++index) place_node(index, on_cpu.traits[index].purity);
    if (std::ranges::none_of(placed_.devices, [](const auto& device) { return device.has_value(); }))
      return std::move(placed_);
    graph::put_equal_twins(placed_.graph);
    capture::annotate(placed_.graph);
    keep_lone_moves();
    return std::move(placed_);
  }

 private:
  void put(ValueId value, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    frame_[value] = without_values(tensor);
    if (!tensor.is_cpu()) placed_.devices[value] = tensor.device();
  }

  // Returns the graph on the CPU. Its traits describe the calls apart from the device of their results.
  static graph::Graph all_on_cpu(graph::Graph graph) {
    for (Node& node : graph.nodes) put_on_cpu(node);
    capture::annotate(graph);
    return graph;
  }

  static void put_on_cpu(Node& node) {
    for (graph::Keyword& keyword : node.kwargs)
      if (keyword.value.get<graph::Device>() != nullptr) keyword.value = {graph::Device{"cpu", {}}};
  }

  void place_node(size_t index, graph::Purity purity) {
    Node& node = placed_.graph.nodes[index];
    const std::optional<c10::Device> device = device_of_results(node);
    const std::vector<graph::OperandForm> forms = forms_of(node);
    if (node.op.starts_with("aten::to.")) rewrite_conversion(node, device);
    put_on_cpu(node);
    if (only_computes(node, purity)) run(node);  // the others stay, so their results need not be known
    if (!device || gives_numbers(node)) return;
    for (const ValueId result : node.results) placed_.devices[result] = device;
    const bool is_on_device = node.op.starts_with("aten::") || node.op.starts_with(capture::kDeclared);
    if (is_on_device) node.on = graph::OnDevice{.device = capture::device_from_torch(*device), .operands = forms};
  }

  // If an operand is unknown, so is the result: nodes that depend on a parameter are not run.
  static bool only_computes(const Node& node, graph::Purity purity) {
    const bool is_conversion =
        node.op.starts_with("aten::to.") || node.op == "aten::_to_copy" || node.op == "aten::alias";
    return is_conversion || purity == graph::Purity::kPure || purity == graph::Purity::kMetadata;
  }

  bool gives_numbers(const Node& node) const {
    const graph::SizeOp* size_op = graph::find_size_op(node.op);
    if (size_op != nullptr && size_op->kind != graph::SizeOpKind::kList) return true;
    const auto is_number = [&](ValueId value) { return frame_[value].isScalar() || frame_[value].isIntList(); };
    if (std::ranges::all_of(node.results, is_number)) return true;
    const auto matched = capture::match_schema(node);
    if (!matched) return false;
    const auto& returns = matched.value().op.schema().returns();
    return std::ranges::none_of(returns, [](const c10::Argument& result) {
      return result.type()->kind() == c10::TypeKind::TensorType || result.type()->kind() == c10::TypeKind::ListType;
    });
  }

  // The device that an operator names, or else the device of its operands.
  std::optional<c10::Device> device_of_results(const Node& node) const {
    const graph::Device* name = nullptr;
    for (const graph::Argument& argument : node.args)
      if (const auto* device = argument.get<graph::Device>()) name = device;
    for (const graph::Keyword& keyword : node.kwargs)
      if (const auto* device = keyword.value.get<graph::Device>()) name = device;
    if (name != nullptr) return device_of(*name);
    std::optional<c10::Device> found;
    graph::for_each_operand(node, [&](ValueId value) {
      if (!found) found = placed_.devices[value];
    });
    return found;
  }

  std::vector<graph::OperandForm> forms_of(const Node& node) const {
    std::vector<graph::OperandForm> forms;
    graph::for_each_operand(node, [&](ValueId value) {
      graph::OperandForm form;
      if (const c10::IValue& known = frame_[value]; known.isTensor() && known.toTensor().defined()) {
        form.dtype = capture::dtype_from_torch(known.toTensor().scalar_type());
        form.is_on_host = !placed_.devices[value].has_value();
      }
      forms.push_back(form);
    });
    return forms;
  }

  // `to` returns its argument if no change is needed, and otherwise a copy.
  void rewrite_conversion(Node& node, const std::optional<c10::Device>& device) {
    const auto matched = capture::match_schema(node);
    if (!matched || node.args.empty() || node.args[0].get<graph::ValueRef>() == nullptr) return;
    const auto& call = matched.value();
    const ValueId source = node.args[0].get<graph::ValueRef>()->id;
    if (!frame_[source].isTensor() || !frame_[source].toTensor().defined()) return;
    if (!device && !placed_.devices[source]) return;  // on the CPU: unchanged
    const auto is_given = [&](std::string_view name) {
      const graph::Argument* argument = capture::argument_named(call, name);
      return argument != nullptr && argument->get<graph::None>() == nullptr;
    };
    if (is_given("memory_format") || is_given("other") || is_given("layout") || is_given("pin_memory")) return;
    const auto* dtype = literal_of<graph::Dtype>(capture::argument_named(call, "dtype"));
    const auto* copies = literal_of<bool>(capture::argument_named(call, "copy"));
    if ((is_given("dtype") && dtype == nullptr) || (is_given("copy") && copies == nullptr)) return;  // known later
    const auto present = capture::dtype_from_torch(frame_[source].toTensor().scalar_type());
    const bool is_other = dtype != nullptr && present != *dtype;
    const bool is_copy = is_other || device != placed_.devices[source] || (copies != nullptr && *copies);
    const graph::Argument from = node.args[0];
    const graph::Dtype to = is_other ? *dtype : graph::Dtype();
    node.op = is_copy ? "aten::_to_copy" : "aten::alias";
    node.args = {from};
    node.kwargs.clear();
    if (is_other) node.kwargs.push_back({"dtype", {to}});
  }

  // A leaf is sent anyway: a worker that only copied it would send it twice.
  void keep_lone_moves() {
    const graph::Graph& graph = placed_.graph;
    const std::vector<graph::Verdict> verdicts = graph::analyse_effects(graph, {});
    std::vector<bool> is_leaf(graph.value_names.size());
    for (const graph::Input& input : graph.inputs) is_leaf[input.value] = input.kind == graph::InputKind::kLeaf;
    std::vector<bool> is_read_by_workers(graph.value_names.size());
    for (size_t index = graph.nodes.size(); index-- > 0;) {
      if (!verdicts[index].movable) continue;
      const Node& node = graph.nodes[index];
      const bool is_move = node.op == "aten::_to_copy" && node.kwargs.empty() && node.on.has_value();
      if (is_move && is_leaf[node.args[0].get<graph::ValueRef>()->id] && !is_read_by_workers[node.results[0]]) {
        graph::Traits& traits = placed_.graph.traits[index];
        traits.purity = graph::Purity::kState;
        traits.reason = "copies a tensor of the batch to the device, and no operator that depends only on it can move";
      } else if (placed_.graph.traits[index].purity != graph::Purity::kMetadata) {
        graph::for_each_operand(node, [&](ValueId value) { is_read_by_workers[value] = true; });
      }
    }
  }

  // Returns the node without the device that it names: its results are where its operands are, on the meta device, or
  // on the CPU.
  static Node without_device(Node node) {
    node.on.reset();
    std::erase_if(node.kwargs, [](const graph::Keyword& keyword) { return keyword.name == "device"; });
    return node;
  }

  // Fills the frame with the metadata of the results. Results of nodes that cannot be run stay unknown, and so do
  // values that depend on them.
  void run(const Node& node) {
    bool is_known = true;
    graph::for_each_operand(node, [&](ValueId value) { is_known = is_known && !frame_[value].isNone(); });
    if (!is_known) return;
    const auto call = OperatorCall::prepare(without_device(node));
    if (!call) return;
    stack_.clear();
    if (!call.value().run(frame_, stack_) && !run_on_zeros(node, call.value())) return;
    for (const ValueId result : node.results) frame_[result] = as(frame_[result], &without_values);
  }

  // The meta kernels of many operators exist only in Python, which a C++ program does not have.
  bool run_on_zeros(const Node& node, const OperatorCall& call) {
    std::map<ValueId, c10::IValue> meta;
    graph::for_each_operand(node, [&](ValueId value) { meta.emplace(value, frame_[value]); });
    for (const auto& [value, without] : meta) frame_[value] = as(without, &zeros_like);
    stack_.clear();
    const bool has_run = static_cast<bool>(call.run(frame_, stack_));
    for (const auto& [value, without] : meta) frame_[value] = without;
    return has_run;
  }

  static at::Tensor zeros_like(const at::Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)).zero_();
  }

  // Applies `of` to each tensor of a value.
  static c10::IValue as(const c10::IValue& value, at::Tensor (*of)(const at::Tensor&)) {
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(of(value.toTensor())) : value;
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(of(tensor));
    return list;
  }

  PlacedGraph placed_;
  Frame frame_;  // meta tensors and numbers
  c10::Stack stack_;
};

}  // namespace

PlacedGraph place_on_devices(const graph::Graph& graph, std::span<const at::Tensor> leaves,
                             std::span<const at::Tensor> constants) {
  return Placement(graph, leaves, constants).place();
}

std::vector<at::Tensor> on_host(std::span<const at::Tensor> tensors) {
  std::vector<at::Tensor> found;
  found.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors)
    found.push_back(!tensor.defined() || tensor.is_cpu() ? tensor : tensor.detach().cpu());
  return found;
}

}  // namespace penstock::runtime
