// SPDX-License-Identifier: Apache-2.0
#include "api/module_call.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "penstock/error.h"

namespace penstock::api {
namespace {

using Kind = Value::Kind;

bool is_sequence(const Value& value) { return value.kind() == Kind::kList || value.kind() == Kind::kTuple; }

// Converts the value to an argument of the type; no value if it does not fit.
std::optional<c10::IValue> convert(const Value& value, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      if (value.is_none()) return c10::IValue();
      return convert(value, *type.expectRef<c10::OptionalType>().getElementType());
    case c10::TypeKind::TensorType:
      return value.is_tensor() ? std::optional<c10::IValue>(value.tensor()) : std::nullopt;
    case c10::TypeKind::BoolType:
      return value.kind() == Kind::kBoolean ? std::optional<c10::IValue>(value.boolean()) : std::nullopt;
    case c10::TypeKind::IntType:
      return value.kind() == Kind::kInteger ? std::optional<c10::IValue>(value.integer()) : std::nullopt;
    case c10::TypeKind::FloatType:
      return value.kind() == Kind::kNumber || value.kind() == Kind::kInteger
                 ? std::optional<c10::IValue>(value.number())
                 : std::nullopt;
    case c10::TypeKind::StringType:
      return value.kind() == Kind::kText ? std::optional<c10::IValue>(value.text()) : std::nullopt;
    case c10::TypeKind::ListType: {
      if (!is_sequence(value)) return std::nullopt;
      const auto& element = type.expectRef<c10::ListType>().getElementType();
      c10::impl::GenericList list(element);
      for (const Value& item : value.items()) {
        auto converted = convert(item, *element);
        if (!converted) return std::nullopt;
        list.push_back(*std::move(converted));
      }
      return c10::IValue(std::move(list));
    }
    case c10::TypeKind::TupleType: {
      const auto elements = type.expectRef<c10::TupleType>().elements();
      if (!is_sequence(value) || value.size() != elements.size()) return std::nullopt;
      std::vector<c10::IValue> parts;
      for (size_t index = 0; index < elements.size(); ++index) {
        auto converted = convert(value[index], *elements[index]);
        if (!converted) return std::nullopt;
        parts.push_back(*std::move(converted));
      }
      return c10::IValue(c10::ivalue::Tuple::create(std::move(parts)));
    }
    case c10::TypeKind::DictType: {
      const auto& dict_type = type.expectRef<c10::DictType>();
      if (value.kind() != Kind::kDict || dict_type.getKeyType()->kind() != c10::TypeKind::StringType)
        return std::nullopt;
      c10::impl::GenericDict dict(dict_type.getKeyType(), dict_type.getValueType());
      for (const Value::Entry& entry : value.entries()) {
        auto converted = convert(entry.value, *dict_type.getValueType());
        if (!converted || entry.key.kind() != Kind::kText) return std::nullopt;
        dict.insert(entry.key.text(), *std::move(converted));
      }
      return c10::IValue(std::move(dict));
    }
    default: return std::nullopt;
  }
}

const Value* part_for(const c10::Argument& argument, size_t place, const Value& batch) {
  if (batch.kind() == Kind::kDict) return batch.find(argument.name());
  if (is_sequence(batch)) return place < batch.size() ? &batch[place] : nullptr;
  return place == 0 ? &batch : nullptr;
}

}  // namespace

std::vector<c10::IValue> arguments_of(const c10::FunctionSchema& schema, const Value& batch) {
  const auto& declared = schema.arguments();
  const size_t first = !declared.empty() && declared[0].name() == "self" ? 1 : 0;
  std::vector<c10::IValue> arguments;
  for (size_t index = first; index < declared.size(); ++index) {
    const c10::Argument& argument = declared[index];
    const Value* part = part_for(argument, index - first, batch);
    if (part == nullptr) {
      if (argument.default_value()) {
        arguments.push_back(*argument.default_value());
        continue;
      }
      throw Error(ErrorKind::kValue,
                  "the module's forward takes '" + argument.name() + "' (" + argument.type()->annotation_str() +
                      "), which the batch does not have: it is " + batch.describe() +
                      "; name the parts of the batch like the arguments of forward, or return them in order");
    }
    auto converted = convert(*part, *argument.type());
    if (!converted) {
      throw Error(ErrorKind::kValue, "the module's forward takes '" + argument.name() + "' of type " +
                                         argument.type()->annotation_str() + ", but the batch has " + part->describe() +
                                         "; change the dataset or the module");
    }
    arguments.push_back(*std::move(converted));
  }
  return arguments;
}

size_t parts_left_over(const c10::FunctionSchema& schema, const Value& batch) {
  const auto& declared = schema.arguments();
  const size_t taken = declared.size() - (!declared.empty() && declared[0].name() == "self" ? 1 : 0);
  return is_sequence(batch) ? batch.size() - std::min(batch.size(), taken) : 0;
}

Value value_of(const c10::IValue& result) {
  if (result.isNone()) return {};
  if (result.isTensor()) return {result.toTensor()};
  if (result.isBool()) return {result.toBool()};
  if (result.isInt()) return {result.toInt()};
  if (result.isDouble()) return {result.toDouble()};
  if (result.isString()) return {result.toStringRef()};
  if (result.isTuple()) {
    Value::Items items;
    for (const c10::IValue& element : result.toTupleRef().elements()) items.push_back(value_of(element));
    return Value::tuple(std::move(items));
  }
  if (result.isList()) {
    Value::Items items;
    for (const c10::IValue& element : result.toListRef()) items.push_back(value_of(element));
    return Value::list(std::move(items));
  }
  if (result.isGenericDict()) {
    Value::Entries entries;
    for (const auto& entry : result.toGenericDict())
      entries.push_back({.key = value_of(entry.key()), .value = value_of(entry.value())});
    return Value::dict(std::move(entries));
  }
  throw Error(ErrorKind::kUnsupported,
              "the module returned a " + result.tagKind() +
                  ", which a batch cannot contain; tensors, numbers, text, lists, tuples and dicts are expected");
}

namespace {

const torch::jit::Node* find_draw(const torch::jit::Block& block) {
  for (const torch::jit::Node* node : block.nodes()) {
    if (node->isNondeterministic()) return node;
    for (const torch::jit::Block* inner : node->blocks())
      if (const torch::jit::Node* found = find_draw(*inner)) return found;
  }
  return nullptr;
}

}  // namespace

void check_draws_nothing(const torch::jit::Module& module) {
  const auto graph = module.get_method("forward").graph()->copy();
  torch::jit::Inline(*graph);
  const torch::jit::Node* draw = find_draw(*graph->block());
  if (draw == nullptr) return;
  throw Error(ErrorKind::kUnsupported,
              "Options::transform must not draw random numbers (" + std::string(draw->kind().toDisplayString()) +
                  "), because the threads of a process share one generator; draw them in the dataset with "
                  "Draws::sample_generator(), or call eval() if the module draws only in training");
}

Value BatchTransform::apply(const Value& batch) {
  const auto method = module_.get_method("forward");
  const c10::FunctionSchema& schema = method.function().getSchema();
  if (const size_t count = parts_left_over(schema, batch); count > 0) {
    throw Error(ErrorKind::kValue, "Options::transform must take every part of the batch, which is " +
                                       batch.describe() + ", and " + std::to_string(count) +
                                       " would be lost; let the module's forward take the whole batch and return it");
  }
  const torch::jit::GraphOptimizerEnabledGuard unoptimized(false);
  return value_of(module_.forward(arguments_of(schema, batch)));
}

}  // namespace penstock::api
