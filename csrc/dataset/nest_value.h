// SPDX-License-Identifier: Apache-2.0
#pragma once
// Converts between a batch as a value and a batch as it is sent: a nest of tokens and a table of tensors. A value
// without tensors is also converted to bytes.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "base/result.h"
#include "penstock/value.h"
#include "wire/nest.h"

namespace penstock::dataset {

struct NestedTensors {
  std::vector<at::Tensor> tensors;
  wire::NestWriter nest;
};

// Returns kMalformed for a value that is nested deeper than a nest may be, or has an undefined tensor.
Result<NestedTensors> write_value(const Value& value);

// Returns the same value with each tensor replaced by `map` of it.
Value with_tensors(const Value& value, const std::function<at::Tensor(const at::Tensor&)>& map);

// Returns the value of a nest that has passed check_nest(). Returns kUnsupported for parts without a C++ type: pickled
// objects, integers beyond 64 bits, and arrays of text, dates or other byte orders.
Result<Value> read_value(std::span<const std::byte> nest, std::span<const at::Tensor> tensors);

// A value without tensors as bytes, such as the dataset state that a worker sends to the trainer: a nest in a packed
// record, as written by Python's encode_value(). Returns kMalformed for a value with tensors, and as write_value().
Result<std::vector<std::byte>> pack_value(const Value& value);
// Returns kMalformed for bytes that are not a packed value, kUnsupported as read_value().
Result<Value> unpack_value(std::span<const std::byte> bytes);

}  // namespace penstock::dataset
