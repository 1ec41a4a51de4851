// SPDX-License-Identifier: Apache-2.0
#include "runtime/operator_call.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "base/assert.h"
#include "capture/schema.h"
#include "capture/types.h"
#include "graph/ir_text.h"
#include "runtime/write_over.h"

namespace penstock::runtime {
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

void OperatorCall::let_write_over_operand() {
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
