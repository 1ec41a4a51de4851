// SPDX-License-Identifier: Apache-2.0
#pragma once
// One argument of a call, prepared once so that a run only copies it: a constant, a value of the frame, or a list that
// contains values.

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <span>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::runtime {

// Thread-compatible.
class CallSlot {
 public:
  // Prepares an argument for a parameter of `type` (a schema's real_type). Returns kMismatch if the literal has another
  // type; the types of values are checked when the call runs.
  static Result<CallSlot> prepare(const graph::Argument& argument, const c10::TypePtr& type);

  static CallSlot constant(c10::IValue value);

  // Returns the argument, with values taken from `frame` by ValueId. Throws c10::Error if a value has the wrong type.
  c10::IValue fill(std::span<const c10::IValue> frame) const;

 private:
  enum class Kind : uint8_t { kConstant, kValue, kList };

  Kind kind_ = Kind::kConstant;
  c10::IValue constant_;
  graph::ValueId value_ = 0;
  bool widens_ = false;  // an integer in the frame becomes a float
  c10::TypePtr item_type_;
  std::vector<CallSlot> items_;
};

}  // namespace penstock::runtime
