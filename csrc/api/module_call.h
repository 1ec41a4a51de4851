// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversions between batches and the arguments and results of a scripted module.

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

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

}  // namespace penstock::api
