// SPDX-License-Identifier: Apache-2.0
#pragma once
// Between a batch as a value and a batch as it travels: a nest of tokens beside a table of tensors.

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

// kMalformed for a value that is nested deeper than a nest may be, or has an undefined tensor.
Result<NestedTensors> write_value(const Value& value);

// The same value with another tensor in the place of each.
Value with_tensors(const Value& value, const std::function<at::Tensor(const at::Tensor&)>& map);

// The value of a nest that check_nest() has passed. kUnsupported for parts that no C++ type stands for: pickled
// objects, integers beyond 64 bits, and arrays of text, dates or other byte orders.
Result<Value> read_value(std::span<const std::byte> nest, std::span<const at::Tensor> tensors);

}  // namespace penstock::dataset
