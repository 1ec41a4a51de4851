// SPDX-License-Identifier: Apache-2.0
#pragma once
// One node prepared to run: its operator resolved in the dispatcher, or one of penstock's size operators, and its
// arguments arranged as the operator's schema requires.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"
#include "graph/size_ops.h"
#include "runtime/call_slot.h"

namespace penstock::runtime {

// By ValueId.
using Frame = std::vector<c10::IValue>;

// Thread-compatible.
class OperatorCall {
 public:
  // Returns kUnsupported if there is no such operator, kMalformed or kMismatch if the arguments do not fit it.
  static Result<OperatorCall> prepare(const graph::Node& node);

  // Runs the operator over the frame and stores its results there. `stack` is scratch that keeps its memory between
  // calls. A torch exception becomes kFailed with the operator, the line of the program that calls it, and the
  // operands' shapes. The caller holds an ExecutionGuard.
  Result<void> run(Frame& frame, c10::Stack& stack) const;

  // Call if the first operand is not read after this call, so that the result may be written over it.
  void let_write_over_operand();

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

// Returns a description such as "float32 [2, 3]", for messages.
std::string describe_value(const c10::IValue& value);

}  // namespace penstock::runtime
