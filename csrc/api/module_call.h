// SPDX-License-Identifier: Apache-2.0
#pragma once
// Between a batch and the arguments of a scripted module.

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "penstock/value.h"

namespace penstock::api {

// The arguments of `schema`, but for the module itself, taken from a batch. A dict gives them by name; its other parts
// are left. A list or a tuple gives them by place, from its first part on; anything else is the first argument. What
// the batch does not give has a default. Throws Error kValue, naming the argument and what the batch has, for one that
// is missing, or is of another type.
std::vector<c10::IValue> arguments_of(const c10::FunctionSchema& schema, const Value& batch);

// The parts of a list or tuple that arguments_of() leaves over; 0 for other batches.
size_t parts_left_over(const c10::FunctionSchema& schema, const Value& batch);

// A result as a value. Throws Error kUnsupported for types that a value cannot have.
Value value_of(const c10::IValue& result);

}  // namespace penstock::api
