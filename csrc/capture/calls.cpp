// SPDX-License-Identifier: Apache-2.0
#include "capture/calls.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "capture/schema.h"
#include "graph/size_ops.h"

namespace penstock::capture {
namespace {

namespace jit = torch::jit;

// One of TorchScript's internal operators on numbers, which the dispatcher does not have, with the name of the
// equivalent size:: operator.
struct NumberOp {
  std::string_view torchscript;  // without overload: each takes only ints, floats or bools
  std::string_view size_op;
};

inline constexpr std::array<NumberOp, 25> kNumberOps = {{{"aten::add", "size::add"},
                                                         {"aten::sub", "size::sub"},
                                                         {"aten::mul", "size::mul"},
                                                         {"aten::div", "size::truediv"},
                                                         {"aten::floordiv", "size::floordiv"},
                                                         {"aten::floor_divide", "size::floordiv"},
                                                         {"aten::remainder", "size::mod"},
                                                         {"aten::pow", "size::pow"},
                                                         {"prim::min", "size::min"},
                                                         {"prim::max", "size::max"},
                                                         {"aten::eq", "size::eq"},
                                                         {"aten::ne", "size::ne"},
                                                         {"aten::lt", "size::lt"},
                                                         {"aten::le", "size::le"},
                                                         {"aten::gt", "size::gt"},
                                                         {"aten::ge", "size::ge"},
                                                         {"aten::neg", "size::neg"},
                                                         {"prim::abs", "size::abs"},
                                                         {"aten::__not__", "size::not"},
                                                         {"aten::Int", "size::int"},
                                                         {"aten::Float", "size::float"},
                                                         {"aten::Bool", "size::bool"},
                                                         {"aten::floor", "size::floor"},
                                                         {"aten::ceil", "size::ceil"},
                                                         {"aten::sqrt", "size::sqrt"}}};

void compare_identity(ProgramValues& values, const jit::Node* node, bool is_same) {
  const Bound& a = values.lookup(node->inputs()[0]);
  const Bound& b = values.lookup(node->inputs()[1]);
  if (!a.is_none() && !b.is_none()) refuse(node, "compares identities of values");
  for (const Bound* bound : {&a, &b})
    if (values.builder().may_be_none(*bound)) {
      values.bind(node->output(), values.emit(node, "opaque::is", {bound->argument}));
      return;
    }
  values.bind(node->output(), Bound::of_number((a.is_none() && b.is_none()) == is_same));
}

bool combine_truths(ProgramValues& values, const jit::Node* node, bool is_and) {
  const auto* a = values.lookup(node->inputs()[0]).argument.get<bool>();
  const auto* b = values.lookup(node->inputs()[1]).argument.get<bool>();
  if (a == nullptr || b == nullptr) return false;
  values.bind(node->output(), Bound::of_argument({is_and ? *a && *b : *a || *b}));
  return true;
}

bool read_metadata(ProgramValues& values, const jit::Node* node, std::string_view kind) {
  const Bound of = values.lookup(node->inputs()[0]);
  if (kind == "aten::len") {
    if (const auto* text = of.argument.get<std::string>()) {
      values.bind(node->output(), Bound::of_number(static_cast<int64_t>(text->size())));
      return true;
    }
    if (const auto items = of.elements()) {
      values.bind(node->output(), Bound::of_argument({static_cast<int64_t>(items->size())}));
      return true;
    }
    if (node->input(0)->type()->kind() == c10::TypeKind::ListType) {
      values.bind(node->output(), values.emit(node, "list::length", {of.argument}));
      return true;
    }
  }
  if (node->input(0)->type()->kind() != c10::TypeKind::TensorType || of.is_number_tensor) return false;
  if (const auto rank = values.builder().rank_of(of); rank && kind == "aten::dim") {
    values.bind(node->output(), Bound::of_number(static_cast<int64_t>(*rank)));
    return true;
  }
  std::vector<graph::Argument> arguments{of.argument};
  std::string op;
  if (kind == "aten::size" && node->inputs().size() == 2) {
    op = "aten::sym_size.int";
    arguments.push_back(values.lookup(node->inputs()[1]).argument);
  } else if (kind == "aten::len") {
    op = "aten::sym_size.int";
    arguments.push_back({int64_t{0}});
  } else {
    op = kind == "aten::size"    ? "size::sizes"
         : kind == "aten::dim"   ? "size::rank"
         : kind == "aten::numel" ? "size::numel"
                                 : "size::dtype";
  }
  values.bind(node->output(), values.emit(node, op, std::move(arguments)));
  return true;
}

// Arithmetic on numbers. Computed at once if all operands are known.
bool read_arithmetic(ProgramValues& values, const jit::Node* node, std::string_view kind) {
  if (kind == "aten::IntImplicit" || kind == "aten::FloatImplicit" || kind == "aten::ScalarImplicit") {
    if (!values.lookup(node->input()).is_number_tensor) return false;
    Bound bound = values.lookup(node->input());
    bound.is_number_tensor = false;
    values.bind(node->output(), std::move(bound));
    return true;
  }
  const auto found =
      std::find_if(kNumberOps.begin(), kNumberOps.end(), [&](const NumberOp& op) { return op.torchscript == kind; });
  if (found == kNumberOps.end() || node->outputs().size() != 1) return false;
  const graph::SizeOp* op = graph::find_size_op(found->size_op);
  PENSTOCK_ASSERT(op != nullptr, found->size_op, " is in no table");
  bool has_number_tensor = false;
  bool reads_tensor = false;
  std::vector<Bound> operands = values.inputs_of(node);
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].kind != Bound::Kind::kArgument) return false;
    has_number_tensor = has_number_tensor || operands[i].is_number_tensor;
    const bool is_tensor =
        node->inputs()[i]->type()->kind() == c10::TypeKind::TensorType && !operands[i].is_number_tensor;
    if (!is_tensor && !operands[i].number() && operands[i].argument.get<graph::ValueRef>() == nullptr) return false;
    reads_tensor = reads_tensor || is_tensor;
  }
  const bool makes_number = node->output()->type()->kind() != c10::TypeKind::TensorType;
  if (reads_tensor) {
    // int(tensor) and similar calls: the host reads the tensor.
    if (!makes_number || operands.size() != 1 || op->arity != 1) return false;
    operands[0] = values.emit(node, "aten::item", {operands[0].argument});
  } else if (!makes_number && !has_number_tensor) {
    return false;
  }
  if (operands.size() == 3 && has_number_tensor && (kind == "aten::add" || kind == "aten::sub")) {
    const auto alpha = operands[2].number();
    if (!alpha || *alpha != graph::Number(int64_t{1})) refuse(node, "scales a size");
    operands.pop_back();
  }
  if (operands.size() != op->arity) return false;
  std::vector<graph::Number> numbers;
  std::vector<graph::Argument> arguments;
  for (const Bound& operand : operands) {
    if (const auto number = operand.number()) numbers.push_back(*number);
    arguments.push_back(operand.argument);
  }
  Bound result;
  if (numbers.size() == operands.size()) {
    const auto value = graph::evaluate_size_op(*op, numbers);
    if (!value) refuse(node, "cannot be computed: " + value.error().message);
    result = Bound::of_number(value.value());
  } else {
    result = values.emit(node, std::string(op->name), std::move(arguments));
  }
  result.is_number_tensor = !makes_number;
  values.bind(node->output(), std::move(result));
  return true;
}

}  // namespace

bool read_number(ProgramValues& values, const jit::Node* node) {
  const std::string_view kind = node->kind().toQualString();
  if (kind == "prim::NumToTensor") {
    Bound bound = values.lookup(node->input());
    bound.is_number_tensor = true;
    values.bind(node->output(), std::move(bound));
    return true;
  }
  if (kind == "aten::__is__" || kind == "aten::__isnot__") {
    compare_identity(values, node, kind == "aten::__is__");
    return true;
  }
  if (kind == "aten::__and__" || kind == "aten::__or__") return combine_truths(values, node, kind == "aten::__and__");
  if (kind == "aten::len" || kind == "aten::size" || kind == "aten::dim" || kind == "aten::numel" ||
      kind == "prim::dtype")
    return read_metadata(values, node, kind);
  return read_arithmetic(values, node, kind);
}

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

namespace {

namespace jit = torch::jit;

// TorchScript operations other than operator calls; none of them writes. An exception ends the call, and a repeated
// warning is shown once.
constexpr std::array<std::string_view, 21> kHarmless = {"prim::If",
                                                        "prim::Loop",
                                                        "prim::Constant",
                                                        "prim::GetAttr",
                                                        "prim::TupleConstruct",
                                                        "prim::TupleUnpack",
                                                        "prim::TupleIndex",
                                                        "prim::ListConstruct",
                                                        "prim::ListUnpack",
                                                        "prim::DictConstruct",
                                                        "prim::RaiseException",
                                                        "prim::Uninitialized",
                                                        "prim::unchecked_cast",
                                                        "prim::NumToTensor",
                                                        "prim::dtype",
                                                        "prim::device",
                                                        "prim::unchecked_unwrap_optional",
                                                        "aten::warn",
                                                        "aten::is_autocast_enabled",
                                                        "aten::is_autocast_cpu_enabled",
                                                        "aten::is_grad_enabled"};

bool is_tensor(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::OptionalType) return is_tensor(type->containedType(0));
  return type->kind() == c10::TypeKind::TensorType;
}

// Whether the call writes to a list or a dict: values that were read from it before would become invalid.
bool writes_to_a_container(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite() && !is_tensor(argument.real_type());
  });
}

// Collects the reads and effects of a node and of all nodes in its blocks.
class Walk {
 public:
  ControlFlow flow;

  void visit(const jit::Node* node) {
    const std::string_view kind = node->kind().toQualString();
    for (const jit::Value* input : node->inputs()) {
      flow.reads.push_back(input);
      if (input->type()->kind() == c10::TypeKind::ClassType && kind != "prim::GetAttr")
        refuse(node, "uses a module or an object inside data-dependent control flow");
    }
    if (kind == "prim::GetAttr") flow.attributes.push_back(node), flow.reads.push_back(node->output());
    if (std::find(kHarmless.begin(), kHarmless.end(), kind) == kHarmless.end()) visit_call(node);
    for (const jit::Block* block : node->blocks()) {
      for (const jit::Node* inner : block->nodes()) visit(inner);
      for (const jit::Value* output : block->outputs()) flow.reads.push_back(output);
    }
  }

 private:
  void visit_call(const jit::Node* node) {
    const c10::FunctionSchema* schema = node->maybeSchema();
    if (schema == nullptr) return refuse(node, "is not an operator that is supported inside control flow");
    const bool is_from_torch = schema->name().starts_with("aten::") || schema->name().starts_with("prim::");
    if (node->hasSideEffects() || !is_from_torch) refuse(node, "has side effects inside data-dependent control flow");
    if (writes_to_a_container(*schema)) refuse(node, "writes to a list or a dict inside control flow");
    flow.writes = flow.writes || schema->is_mutable();
  }

  void refuse(const jit::Node* node, std::string why) {
    if (!flow.refusal.empty()) return;
    flow.refused = node;
    flow.refusal = std::move(why);
  }
};

}  // namespace

ControlFlow read_control_flow(const jit::Node* node) {
  Walk walk;
  walk.visit(node);
  return std::move(walk.flow);
}

}  // namespace penstock::capture
