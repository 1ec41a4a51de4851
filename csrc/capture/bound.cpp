// SPDX-License-Identifier: Apache-2.0
#include "capture/bound.h"

namespace penstock::capture {

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

}  // namespace penstock::capture
