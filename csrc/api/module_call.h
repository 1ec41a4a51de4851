// SPDX-License-Identifier: Apache-2.0
#pragma once
// Calls of a scripted module with a batch: conversions between batches and the module's arguments and results, and the
// BatchTransform of a loader.

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

#include "penstock/value.h"

namespace penstock::api {

// The arguments of `schema`, except the module itself, taken from a batch. A dict supplies them by name; its other
// parts are ignored. A list or a tuple supplies them by position, starting with its first part; any other value is the
// first argument. Arguments that the batch does not supply take their defaults. Throws Error kValue, naming the
// argument and the parts of the batch, if an argument is missing or has another type.
std::vector<c10::IValue> arguments_of(const c10::FunctionSchema& schema, const Value& batch);

// The number of parts of a list or tuple that arguments_of() does not use; 0 for other batches.
size_t parts_left_over(const c10::FunctionSchema& schema, const Value& batch);

// Converts a result to a value. Throws Error kUnsupported for types that a value cannot hold.
Value value_of(const c10::IValue& result);

// Throws Error kUnsupported if the module of a transform draws random numbers: threads share torch's default generator.
void check_draws_nothing(const torch::jit::Module& module);

// The transform of a loader: a scripted module that runs on every batch where the batch is made. Confined to its
// thread.
class BatchTransform {
 public:
  // Runs a copy of `module`, operator by operator: TorchScript's optimizer may change rounding from the second run on.
  explicit BatchTransform(const torch::jit::Module& module) : module_(module.deepcopy()) {}

  Value apply(const Value& batch);

 private:
  torch::jit::Module module_;
};

}  // namespace penstock::api
