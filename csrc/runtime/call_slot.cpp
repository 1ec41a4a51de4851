// SPDX-License-Identifier: Apache-2.0
#include "runtime/call_slot.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include "capture/types.h"
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

}  // namespace penstock::runtime
