// SPDX-License-Identifier: Apache-2.0
#include "runtime/operator_call.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/TypeProperties.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/result.h"
#include "capture/schema.h"
#include "graph/ir_text.h"

namespace penstock::runtime {
namespace {

using c10::TypeKind;
using graph::Argument;

bool has_values(const Argument& argument) {
  bool found = false;
  graph::for_each_value(argument, [&](graph::ValueId) { found = true; });
  return found;
}

Fault mismatch(const Argument& argument, const c10::TypePtr& type) {
  std::string text;
  graph::print_argument(text, argument, [](std::string& out, graph::ValueId) { out += "%value"; });
  return {Errc::kMismatch, "takes " + type->str() + " where it was given " + text};
}

// Converts a literal other than a list, for a parameter whose type is neither list nor optional.
std::optional<c10::IValue> scalar(const Argument& argument, TypeKind kind) {
  const auto* integer = argument.get<int64_t>();
  const auto* real = argument.get<graph::Real>();
  const auto* truth = argument.get<bool>();
  switch (kind) {
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      if (integer != nullptr) return c10::IValue(*integer);
      break;
    case TypeKind::FloatType:
    case TypeKind::SymFloatType:
      if (real != nullptr) return c10::IValue(real->value);
      if (integer != nullptr) return c10::IValue(static_cast<double>(*integer));
      break;
    case TypeKind::BoolType:
    case TypeKind::SymBoolType:
      if (truth != nullptr) return c10::IValue(*truth);
      break;
    case TypeKind::NumberType:
      if (integer != nullptr) return c10::IValue(*integer);
      if (real != nullptr) return c10::IValue(real->value);
      if (truth != nullptr) return c10::IValue(*truth);
      break;
    case TypeKind::StringType:
      if (const auto* text = argument.get<std::string>()) return c10::IValue(*text);
      break;
    case TypeKind::ScalarTypeType:
      if (const auto* dtype = argument.get<graph::Dtype>()) return c10::IValue(capture::to_torch(*dtype));
      break;
    case TypeKind::LayoutType:
      if (const auto* layout = argument.get<graph::Layout>()) return c10::IValue(capture::to_torch(*layout));
      break;
    case TypeKind::MemoryFormatType:
      if (const auto* format = argument.get<graph::MemoryFormat>()) return c10::IValue(capture::to_torch(*format));
      break;
    case TypeKind::DeviceObjType:
      // Torch would have to know another device's name; prefixes, and everything else here, run on the CPU.
      if (const auto* device = argument.get<graph::Device>(); device != nullptr && device->type == "cpu")
        return c10::IValue(c10::Device(c10::DeviceType::CPU));
      break;
    default: break;
  }
  return std::nullopt;
}

// Makes a list of a type that boxed kernels read without a conversion.
c10::IValue make_list(const c10::TypePtr& item_type, std::vector<c10::IValue> items) {
  const auto fill = [&](auto list, auto read) {
    list.reserve(items.size());
    for (const c10::IValue& item : items) list.push_back(read(item));
    return c10::IValue(std::move(list));
  };
  switch (item_type->kind()) {
    case TypeKind::IntType:
    case TypeKind::SymIntType: return fill(c10::List<int64_t>(), [](const c10::IValue& v) { return v.toInt(); });
    case TypeKind::FloatType:
      return fill(c10::List<double>(),
                  [](const c10::IValue& v) { return v.isInt() ? static_cast<double>(v.toInt()) : v.toDouble(); });
    case TypeKind::BoolType: return fill(c10::List<bool>(), [](const c10::IValue& v) { return v.toBool(); });
    case TypeKind::TensorType: return fill(c10::List<at::Tensor>(), [](const c10::IValue& v) { return v.toTensor(); });
    case TypeKind::OptionalType:
      if (item_type->containedType(0)->kind() == TypeKind::TensorType)
        return fill(c10::List<std::optional<at::Tensor>>(),
                    [](const c10::IValue& v) { return v.toOptional<at::Tensor>(); });
      [[fallthrough]];
    default: {
      c10::impl::GenericList list(item_type);
      for (c10::IValue& item : items) list.push_back(std::move(item));
      return list;
    }
  }
}

}  // namespace

CallSlot CallSlot::constant(c10::IValue value) {
  CallSlot slot;
  slot.constant_ = std::move(value);
  return slot;
}

Result<CallSlot> CallSlot::prepare(const Argument& argument, const c10::TypePtr& type) {
  if (const auto* ref = argument.get<graph::ValueRef>()) {
    CallSlot slot;
    slot.kind_ = Kind::kValue;
    slot.value_ = ref->id;
    const TypeKind kind = (type->kind() == TypeKind::OptionalType ? type->containedType(0) : type)->kind();
    slot.widens_ = kind == TypeKind::FloatType || kind == TypeKind::SymFloatType;
    return slot;
  }
  if (type->kind() == TypeKind::OptionalType) {
    if (argument.get<graph::None>() != nullptr) return constant(c10::IValue());
    return prepare(argument, type->containedType(0));
  }
  // An optional tensor in a schema may be written as an undefined tensor.
  if (type->kind() == TypeKind::TensorType && argument.get<graph::None>() != nullptr) return constant(at::Tensor());
  if (type->kind() != TypeKind::ListType) {
    if (auto value = scalar(argument, type->kind())) return constant(std::move(*value));
    return mismatch(argument, type);
  }
  CallSlot slot;
  slot.kind_ = Kind::kList;
  slot.item_type_ = type->containedType(0);
  if (const auto* list = argument.get<Argument::List>()) {
    for (const Argument& item : *list) {
      auto prepared = prepare(item, slot.item_type_);
      if (!prepared) return mismatch(argument, type);
      slot.items_.push_back(std::move(prepared).value());
    }
  } else {
    // `int[2] stride=1`: one number stands for a list.
    auto prepared = prepare(argument, slot.item_type_);
    if (!prepared) return mismatch(argument, type);
    slot.items_.push_back(std::move(prepared).value());
  }
  if (has_values(argument)) return slot;
  return constant(slot.fill({}));
}

c10::IValue CallSlot::fill(std::span<const c10::IValue> frame) const {
  switch (kind_) {
    case Kind::kConstant: return constant_;
    case Kind::kValue:
      if (widens_ && frame[value_].isInt()) return static_cast<double>(frame[value_].toInt());
      return frame[value_];
    case Kind::kList: break;
  }
  std::vector<c10::IValue> items;
  items.reserve(items_.size());
  for (const CallSlot& item : items_) items.push_back(item.fill(frame));
  return make_list(item_type_, std::move(items));
}

namespace {

// Elementwise; in place, they give the same bits for float32 and float64.
constexpr std::array<std::string_view, 33> kElementwise = {"aten::abs",
                                                           "aten::add.Scalar",
                                                           "aten::add.Tensor",
                                                           "aten::ceil",
                                                           "aten::clamp",
                                                           "aten::clamp_max",
                                                           "aten::clamp_min",
                                                           "aten::cos",
                                                           "aten::div.Scalar",
                                                           "aten::div.Tensor",
                                                           "aten::exp",
                                                           "aten::expm1",
                                                           "aten::floor",
                                                           "aten::leaky_relu",
                                                           "aten::log",
                                                           "aten::log10",
                                                           "aten::log1p",
                                                           "aten::log2",
                                                           "aten::mul.Scalar",
                                                           "aten::mul.Tensor",
                                                           "aten::neg",
                                                           "aten::pow.Tensor_Scalar",
                                                           "aten::reciprocal",
                                                           "aten::relu",
                                                           "aten::round",
                                                           "aten::rsqrt",
                                                           "aten::sigmoid",
                                                           "aten::sin",
                                                           "aten::sqrt",
                                                           "aten::sub.Scalar",
                                                           "aten::sub.Tensor",
                                                           "aten::tanh",
                                                           "aten::masked_fill.Scalar"};

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == c10::Layout::Strided && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor() && !tensor.is_nested();
}

}  // namespace

std::optional<c10::OperatorHandle> find_write_over(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  if (std::find(kElementwise.begin(), kElementwise.end(), full_name(name)) == kElementwise.end()) return std::nullopt;
  const std::string overload = name.overload_name == "Tensor_Scalar" ? "Scalar" : name.overload_name;
  auto found = c10::Dispatcher::singleton().findSchema({name.name + "_", overload});
  if (!found) return std::nullopt;
  const auto& ours = op.schema().arguments();
  const auto& theirs = found->schema().arguments();
  const bool is_same = std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), [](auto& a, auto& b) {
    return a.name() == b.name() && *a.real_type() == *b.real_type();
  });
  return is_same ? found : std::nullopt;
}

bool can_write_over(std::span<const c10::IValue> arguments) {
  const at::Tensor& target = arguments[0].toTensor();
  // For half precision, some in-place variants differ: `mul_` rounds its factor first.
  const bool is_computed_alike = target.scalar_type() == at::kFloat || target.scalar_type() == at::kDouble;
  if (!is_computed_alike || !is_plain(target) || !target.is_contiguous() ||
      static_cast<int64_t>(target.nbytes()) < kWriteOverBytesMin)
    return false;
  // The stride of a dimension of size 1 has no meaning, and a result's may differ from the operand's.
  if (std::find(target.sizes().begin(), target.sizes().end(), 1) != target.sizes().end()) return false;
  size_t place_count = 1;  // among the arguments
  for (const c10::IValue& argument : arguments.subspan(1)) {
    if (!argument.isTensor()) {
      if (argument.isComplexDouble()) return false;
      continue;
    }
    const at::Tensor& other = argument.toTensor();
    if (other.is_same(target)) {
      ++place_count;
      continue;
    }
    if (!is_plain(other) || !at::is_expandable_to(other.sizes(), target.sizes())) return false;
    // A mask is not an operand of the arithmetic, but is no wider than the tensor that it masks.
    if (at::result_type(target, other) != target.scalar_type()) return false;
  }
  // Part of a larger storage is refused: the result would keep all of it alive.
  return target.use_count() == place_count + 1 && target.storage().use_count() == 1 &&
         target.storage().nbytes() == target.nbytes();
}

namespace {

// After the first line, torch's messages only have a stack trace of C++ frames.
std::string first_line(const std::string& message) { return message.substr(0, message.find('\n')); }

std::optional<graph::Number> number_of(const c10::IValue& value) {
  if (value.isInt()) return graph::Number(value.toInt());
  if (value.isDouble()) return graph::Number(value.toDouble());
  if (value.isBool()) return graph::Number(value.toBool());
  return std::nullopt;
}

c10::IValue ivalue_of(const graph::Number& number) {
  return std::visit([](auto value) { return c10::IValue(value); }, number);
}

// A size operator's arguments have no schema; any literal of the text is allowed.
Result<CallSlot> prepare_untyped(const graph::Argument& argument) {
  if (const auto* list = argument.get<graph::Argument::List>()) {
    const bool is_numbers = list->empty() || list->front().get<graph::Real>() == nullptr;
    return CallSlot::prepare(
        argument, is_numbers ? c10::TypePtr(c10::ListType::ofInts()) : c10::TypePtr(c10::ListType::ofFloats()));
  }
  return CallSlot::prepare(argument, c10::NumberType::get());
}

}  // namespace

std::string describe_value(const c10::IValue& value) {
  if (!value.isTensor()) return value.tagKind();
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined()) return "no tensor";
  const auto dtype = capture::dtype_from_torch(tensor.scalar_type());
  std::string text(dtype ? name_of(*dtype) : std::string_view(c10::toString(tensor.scalar_type())));
  text += " [";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) text += (dim > 0 ? ", " : "") + std::to_string(tensor.size(dim));
  return text + "]";
}

Result<OperatorCall> OperatorCall::prepare(const graph::Node& node) {
  OperatorCall call;
  call.name_ = graph::describe(node);
  call.results_ = node.results;
  graph::for_each_operand(node, [&](graph::ValueId operand) { call.operands_.push_back(operand); });
  const auto refuse = [&](const Fault& error) { return Fault{error.code, call.name_ + " " + error.message}; };

  call.size_op_ = graph::find_size_op(node.op);
  if (call.size_op_ != nullptr) {
    if (node.args.size() != call.size_op_->arity || !node.kwargs.empty() || node.results.size() != 1)
      return refuse(
          {Errc::kMalformed, "does not have " + std::to_string(call.size_op_->arity) + " arguments and a result"});
    for (const graph::Argument& argument : node.args) {
      auto slot = prepare_untyped(argument);
      if (!slot) return refuse(slot.error());
      call.arguments_.push_back(std::move(slot).value());
    }
    return call;
  }

  const auto matched = capture::match_schema(node);
  if (!matched) return refuse(matched.error());
  call.operator_ = matched.value().op;
  const auto& parameters = call.operator_->schema().arguments();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const graph::Argument* argument = matched.value().arguments[i];
    if (argument == nullptr) {
      call.arguments_.push_back(CallSlot::constant(*parameters[i].default_value()));
      continue;
    }
    auto slot = CallSlot::prepare(*argument, parameters[i].real_type());
    if (!slot) return refuse({slot.error().code, parameters[i].name() + " " + slot.error().message});
    call.arguments_.push_back(std::move(slot).value());
  }
  return call;
}

Result<void> OperatorCall::run(Frame& frame, c10::Stack& stack) const {
  try {
    if (size_op_ != nullptr) return call_size_op(frame);
    call_operator(frame, stack);
    return {};
  } catch (const c10::Error& error) {
    return failure(frame, error.what_without_backtrace());
  } catch (const AssertionFailure&) {
    throw;
  } catch (const std::exception& error) {
    return failure(frame, error.what());
  }
}

void OperatorCall::allow_write_over_operand() {
  if (operator_) write_over_ = find_write_over(*operator_);
}

void OperatorCall::call_operator(Frame& frame, c10::Stack& stack) const {
  stack.clear();
  for (const CallSlot& argument : arguments_) stack.push_back(argument.fill(frame));
  (write_over_ && can_write_over(stack) ? *write_over_ : *operator_).callBoxed(stack);
  PENSTOCK_ASSERT(stack.size() == results_.size(), name_, " gave ", stack.size(), " results");
  for (size_t i = 0; i < results_.size(); ++i) frame[results_[i]] = std::move(stack[i]);
  stack.clear();
}

Result<void> OperatorCall::call_size_op(Frame& frame) const {
  std::vector<c10::IValue> operands;
  for (const CallSlot& argument : arguments_) operands.push_back(argument.fill(frame));
  c10::IValue& result = frame[results_[0]];
  switch (size_op_->kind) {
    case graph::SizeOpKind::kArithmetic: {
      std::vector<graph::Number> numbers;
      for (const c10::IValue& operand : operands) {
        const auto number = number_of(operand);
        if (!number) return failure(frame, "an operand is not a number");
        numbers.push_back(*number);
      }
      const auto value = graph::evaluate_size_op(*size_op_, numbers);
      if (!value) return failure(frame, value.error().message);
      result = ivalue_of(value.value());
      return {};
    }
    case graph::SizeOpKind::kMetadata: {
      if (!operands[0].isTensor()) return failure(frame, "the operand is not a tensor");
      const at::Tensor& tensor = operands[0].toTensor();
      if (size_op_->name == "size::sizes")
        result = tensor.sizes().vec();
      else if (size_op_->name == "size::rank")
        result = tensor.dim();
      else if (size_op_->name == "size::numel")
        result = tensor.numel();
      else
        result = static_cast<int64_t>(tensor.scalar_type());
      return {};
    }
    case graph::SizeOpKind::kList: break;
  }
  if (!operands[0].isList()) return failure(frame, "the operand is not a list");
  const auto list = operands[0].toList();
  if (size_op_->name == "list::length") {
    result = static_cast<int64_t>(list.size());
    return {};
  }
  if (!operands[1].isInt()) return failure(frame, "the index is not an integer");
  const auto position = graph::list_position(operands[1].toInt(), list.size());
  if (!position)
    return failure(frame,
                   "index " + std::to_string(operands[1].toInt()) + " of " + std::to_string(list.size()) + " elements");
  result = list.get(*position);
  return {};
}

Fault OperatorCall::failure(const Frame& frame, const std::string& why) const {
  std::string text = name_ + " failed on (";
  for (size_t i = 0; i < operands_.size(); ++i) text += (i > 0 ? ", " : "") + describe_value(frame[operands_[i]]);
  return {Errc::kFailed, text + "): " + first_line(why)};
}

}  // namespace penstock::runtime
