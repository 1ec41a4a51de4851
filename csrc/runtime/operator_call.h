// SPDX-License-Identifier: Apache-2.0
#pragma once
// An OperatorCall is one node prepared to run: its operator resolved in the dispatcher, or one of penstock's size
// operators, and its arguments arranged as the operator's schema requires (CallSlot). The result may be written over an
// operand that is not needed afterwards (find_write_over).

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"
#include "graph/size_ops.h"

namespace penstock::runtime {

// One argument of a call, prepared once so that a run only copies it: a constant, a value of the frame, or a list that
// contains values. Thread-compatible.
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

// The values of a run, by ValueId.
using Frame = std::vector<c10::IValue>;

// A prepared call of a node's operator. Thread-compatible.
class OperatorCall {
 public:
  // Returns kUnsupported if there is no such operator, kMalformed or kMismatch if the arguments do not fit it.
  static Result<OperatorCall> prepare(const graph::Node& node);

  // Runs the operator over the frame and stores its results there. `stack` is scratch that keeps its memory between
  // calls. A torch exception becomes kFailed with the operator, the line of the program that calls it, and the
  // operands' shapes. The caller holds an ExecutionGuard.
  Result<void> run(Frame& frame, c10::Stack& stack) const;

  // Call if the first operand is not read after this call, so that the result may be written over it.
  void allow_write_over_operand();

 private:
  void call_operator(Frame& frame, c10::Stack& stack) const;
  Result<void> call_size_op(Frame& frame) const;
  Fault failure(const Frame& frame, const std::string& why) const;

  std::string name_;  // of the operator, with its line and label, for messages
  std::optional<c10::OperatorHandle> operator_;
  std::optional<c10::OperatorHandle> write_over_;  // set if the first operand is not needed afterwards
  const graph::SizeOp* size_op_ = nullptr;
  std::vector<CallSlot> arguments_;
  std::vector<graph::ValueId> operands_;
  std::vector<graph::ValueId> results_;
};

// Returns the variant of `op` that writes over its first operand, or none: only operators known to process each element
// separately have one here.
//
// An elementwise operator whose operand is not needed afterwards can write its result over it. The same memory is then
// read and written, and no memory is allocated: normalising 38 MB of images takes 0.54 of the time (`normalise` of
// bench/executor.py). The bits are the same as the plain operator's, since it is the same kernel on the same elements
// in the same order. So are the strides: an operand of the result's shape that is contiguous gives a contiguous result.
std::optional<c10::OperatorHandle> find_write_over(const c10::OperatorHandle& op);

// Whether that variant gives the same result as the plain operator and its write cannot be observed. `arguments` are
// the call's arguments; only the frame and `arguments` hold the first one.
bool can_write_over(std::span<const c10::IValue> arguments);

// Below this size a call costs more than its memory does, so can_write_over() refuses.
inline constexpr int64_t kWriteOverBytesMin = int64_t{16} << 10;

// Returns a description such as "float32 [2, 3]", for messages.
std::string describe_value(const c10::IValue& value);

}  // namespace penstock::runtime
