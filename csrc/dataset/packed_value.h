// SPDX-License-Identifier: Apache-2.0
#pragma once
// A value without tensors as bytes, such as the state of a dataset on its way from a worker to the trainer: a nest in a
// packed record, as Python's encode_value() writes it.

#include <cstddef>
#include <span>
#include <vector>

#include "base/result.h"
#include "penstock/value.h"

namespace penstock::dataset {

// kMalformed for a value with tensors, and as write_value().
Result<std::vector<std::byte>> pack_value(const Value& value);
// kMalformed for bytes that are no packed value, kUnsupported as read_value().
Result<Value> unpack_value(std::span<const std::byte> bytes);

}  // namespace penstock::dataset
