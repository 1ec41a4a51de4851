// SPDX-License-Identifier: Apache-2.0
#pragma once
// The batches that the test's workers serve: a function of epoch, sequence and indices, so that the trainer's side can
// compute the batch that must have come. Some indices are orders to the worker instead.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace penstock::test {

constexpr int64_t kEnd = -1;            // the worker's share is exhausted
constexpr int64_t kDie = -2;            // the worker kills itself
constexpr int64_t kStall = -3;          // the worker answers, and never comes back from its dataset
constexpr int64_t kRaise = -4;          // the batch is an exception
constexpr int64_t kDieWithAChild = -5;  // the same as kDie, and a child of the worker lives on
constexpr int64_t kLarge = 1'000'000;   // from here on a batch has 6 MB, which is above half the arena

using MakeTensor = std::function<at::Tensor(std::vector<int64_t> sizes, at::ScalarType type)>;

// `make` gives the memory of the tensors, which are then filled.
inline std::vector<at::Tensor> make_batch(uint32_t epoch, uint64_t sequence, std::span<const int64_t> indices,
                                          const MakeTensor& make) {
  const auto count = static_cast<int64_t>(indices.size());
  const auto width = static_cast<int64_t>(sequence * 7 % 13) + 1;
  const int64_t first = indices.empty() ? 0 : std::max<int64_t>(indices.front(), 0);
  at::Tensor rows = make({count, width}, at::kLong);
  auto* row = rows.mutable_data_ptr<int64_t>();
  for (const int64_t index : indices) {
    for (int64_t column = 0; column < width; ++column) *row++ = index * 1000 + column + int64_t{epoch} * 1'000'000'000;
  }
  at::Tensor floats = make({first >= kLarge ? 1'500'000 : 1000 * (first % 5)}, at::kFloat);
  auto* value = floats.mutable_data_ptr<float>();
  for (int64_t place = 0; place < floats.numel(); ++place)
    value[place] = static_cast<float>(place % 1000 + first % 100);
  at::Tensor number = make({}, at::kInt);
  *number.mutable_data_ptr<int32_t>() = static_cast<int32_t>(sequence);
  return {rows, floats, number};
}

}  // namespace penstock::test
