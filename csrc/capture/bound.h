// SPDX-License-Identifier: Apache-2.0
#pragma once
// The meaning of a TorchScript value while its program is read: a part of the graph, or a value known now.

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

#include "graph/ir.h"
#include "graph/size_ops.h"

namespace penstock::capture {

struct Bound {
  enum class Kind : uint8_t {
    kArgument,  // a literal, a value of the graph, or a list of them
    kTuple,     // tuples, and lists and dicts of values that cannot be arguments
    kObject,    // a module, or a value that has no form in the graph and must not be used
  };
  Kind kind = Kind::kArgument;
  graph::Argument argument;
  bool is_number_tensor = false;  // a number that traced programs hold as a 0-dim tensor
  std::vector<Bound> items;
  c10::IValue object;
  std::string path;  // of the object: its name in the program

  static Bound of_argument(graph::Argument argument);
  static Bound of_number(const graph::Number& number);
  static Bound of_object(c10::IValue object, std::string path);
  static Bound of_tuple(std::vector<Bound> items);
  static Bound of_list(std::vector<Bound> items);  // an argument if all items are, else a tuple

  bool is_none() const { return kind == Kind::kArgument && argument.get<graph::None>() != nullptr; }

  // The graph value, or null if this is not one.
  const graph::ValueRef* value() const { return kind == Kind::kArgument ? argument.get<graph::ValueRef>() : nullptr; }

  // The number, if this is one that is known now.
  std::optional<graph::Number> number() const;

  // The elements of a tuple, or of a list whose elements are known one by one.
  std::optional<std::vector<Bound>> elements() const;
};

// Thrown to leave nested blocks of a program that cannot be captured; capture_torchscript() turns it into a Fault. It
// does not leave any other public function.
struct Refusal {
  std::string message;
};

}  // namespace penstock::capture
