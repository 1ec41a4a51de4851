// SPDX-License-Identifier: Apache-2.0
#include "capture/calls.h"

#include <optional>
#include <string>
#include <utility>

#include "capture/control_flow.h"
#include "capture/optional.h"
#include "capture/schema.h"
#include "capture/types.h"

namespace penstock::capture {
namespace {

namespace jit = torch::jit;

// TorchScript stores dtypes, layouts and memory formats as integers; the operator's schema determines which of these an
// integer is.
graph::Argument typed(graph::Argument argument, const c10::Argument& parameter, const jit::Node* node) {
  const auto* number = argument.get<int64_t>();
  if (number == nullptr) return argument;
  std::optional<graph::Argument> named;
  switch (without_optional(parameter.real_type())->kind()) {
    case c10::TypeKind::ScalarTypeType:
      if (const auto dtype = dtype_from_torch(static_cast<c10::ScalarType>(*number))) named = graph::Argument{*dtype};
      break;
    case c10::TypeKind::LayoutType:
      if (const auto layout = from_torch<graph::Layout>(kTorchLayouts, static_cast<c10::Layout>(*number)))
        named = graph::Argument{*layout};
      break;
    case c10::TypeKind::MemoryFormatType:
      if (const auto format =
              from_torch<graph::MemoryFormat>(kTorchMemoryFormats, static_cast<c10::MemoryFormat>(*number)))
        named = graph::Argument{*format};
      break;
    default: return argument;
  }
  if (!named)
    refuse(node, "takes " + parameter.name() + "=" + std::to_string(*number) + ", which the graph cannot represent");
  return *named;
}

graph::Argument dtype_argument(const Bound& bound, const jit::Node* node) {
  const auto* number = bound.argument.get<int64_t>();
  if (number == nullptr) return bound.argument;
  const auto dtype = dtype_from_torch(static_cast<c10::ScalarType>(*number));
  if (!dtype) refuse(node, "converts to a dtype that the graph cannot represent");
  return {*dtype};
}

// Reads `x.to(device)`, `x.cuda()` and `x.cpu()`, which TorchScript implements itself, as the dispatcher's operator.
// Returns false if the device is only known at run time.
bool read_move(ProgramValues& values, const jit::Node* node, const std::string& op) {
  graph::Node call;
  call.op = "aten::to.dtype_layout";
  const Bound& source = values.lookup(node->inputs()[0]);
  if (source.value() == nullptr || source.is_number_tensor) return false;
  call.args.push_back(source.argument);
  if (op == "aten::cuda" || op == "aten::cpu") {
    call.kwargs.push_back({"device", {graph::Device{op.substr(sizeof "aten::" - 1), {}}}});
  } else {
    const Bound& device = values.lookup(node->inputs()[1]);
    if (!device.is_none() && device.argument.get<graph::Device>() == nullptr) return false;
    if (!device.is_none()) call.kwargs.push_back({"device", device.argument});
    const Bound& dtype = values.lookup(node->inputs()[2]);
    if (!dtype.is_none()) call.kwargs.push_back({"dtype", dtype_argument(dtype, node)});
    call.kwargs.push_back({"non_blocking", values.lookup(node->inputs()[3]).argument});
    call.kwargs.push_back({"copy", values.lookup(node->inputs()[4]).argument});
  }
  values.bind_call(node, std::move(call));
  return true;
}

// TorchScript's internal computations, such as lists from lists, are kept as they are.
void keep_call(ProgramValues& values, const jit::Node* node, const std::string& op) {
  const ControlFlow flow = read_control_flow(node);
  if (flow.writes || !flow.refusal.empty() || node->hasSideEffects())
    refuse(node, "(" + op + ") is not an operator of the dispatcher");
  graph::Node call;
  call.op = "opaque_view::" + std::string(node->kind().toUnqualString());
  call.args = values.of_graph({node->inputs().begin(), node->inputs().end()});
  values.bind_call(node, std::move(call));
}

}  // namespace

void read_call(ProgramValues& values, const jit::Node* node) {
  const c10::FunctionSchema* schema = node->maybeSchema();
  if (schema == nullptr) refuse(node, "is not an operator that can be captured");
  std::string op = schema->name() + (schema->overload_name().empty() ? "" : "." + schema->overload_name());
  if (op == "aten::to.prim_dtype") op = "aten::to.dtype";
  const bool is_move = op == "aten::to.prim_Device" || op == "aten::cuda" || op == "aten::cpu";
  if (is_move && read_move(values, node, op)) return;
  const auto handle = find_operator(op);
  if (!handle) return keep_call(values, node, op);
  const auto& parameters = handle->schema().arguments();
  if (node->inputs().size() > parameters.size()) refuse(node, "has other arguments than " + op);
  graph::Node call;
  for (size_t i = 0; i < node->inputs().size(); ++i) {
    const Bound& bound = values.lookup(node->inputs()[i]);
    if (bound.is_number_tensor) refuse(node, "computes with a size held in a tensor");
    graph::Argument argument = bound.argument;
    if (bound.kind != Bound::Kind::kArgument)
      refuse(node, "takes " + parameters[i].name() + ", which is not a tensor, a number or a list of them");
    if (parameters[i].name() == "generator" && argument.get<graph::None>() == nullptr)
      refuse(node, "takes a generator");
    argument = typed(std::move(argument), parameters[i], node);
    if (parameters[i].kwarg_only())
      call.kwargs.push_back({parameters[i].name(), std::move(argument)});
    else
      call.args.push_back(std::move(argument));
  }
  call.op = std::move(op);
  values.bind_call(node, std::move(call));
}

}  // namespace penstock::capture
