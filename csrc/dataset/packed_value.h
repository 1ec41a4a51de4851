// SPDX-License-Identifier: Apache-2.0
#pragma once
// A value without tensors as bytes, such as the dataset state that a worker sends to the trainer: a nest in a packed
// record, as written by Python's encode_value().

#include <cstddef>
#include <span>
#include <vector>

#include "base/result.h"
#include "penstock/value.h"

namespace penstock::dataset {

// Returns kMalformed for a value with tensors, and as write_value().
Result<std::vector<std::byte>> pack_value(const Value& value);
// Returns kMalformed for bytes that are not a packed value, kUnsupported as read_value().
Result<Value> unpack_value(std::span<const std::byte> bytes);

}  // namespace penstock::dataset
