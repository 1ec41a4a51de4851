// SPDX-License-Identifier: Apache-2.0
#pragma once
// The shape of a tensor that is written with fewer bytes, as read by the code that widens it immediately (narrow.cpp)
// and the code that checks it for a device (widening.cpp).

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

#include "base/result.h"
#include "wire/frame.h"
#include "wire/malformed.h"

namespace penstock::wire {

inline Fault malformed_narrow(std::string_view reason) { return malformed("a compressed tensor", reason); }

// Whether its elements are contiguous in the order of its dimensions.
inline bool is_contiguous(const TensorEntry& entry) {
  int64_t expected = 1;
  for (size_t dim = entry.shape.size(); dim-- > 0;) {
    if (entry.shape[dim] != 1 && entry.strides[dim] != expected) return false;
    expected *= entry.shape[dim];
  }
  return true;
}

// Bytes of the base in front of the offsets.
constexpr uint64_t kBaseBytes = 8;

// Bytes of an offset.
constexpr uint64_t offset_bytes(Encoding encoding) {
  return encoding == Encoding::kOffset8 ? 1 : encoding == Encoding::kOffset16 ? 2 : 4;
}

constexpr uint64_t bit_bytes(uint64_t count) { return (count + 7) / 8; }

// Rows of the encoding kRows: the first dimension.
inline size_t row_count_of(const TensorEntry& entry) {
  return entry.shape.empty() ? 0 : static_cast<size_t>(entry.shape.front());
}

// Whether the bytes are exactly `distinct_count` rows. The product of the two factors may overflow.
constexpr bool are_rows_there(uint64_t bytes, uint32_t distinct_count, uint64_t row_bytes) {
  return bytes % row_bytes == 0 && bytes / row_bytes == distinct_count;
}

// Rows of the encoding kPadded: the last dimension.
struct PaddedShape {
  size_t row_count = 0;
  size_t length = 0;  // of each row, in elements
  uint64_t item_bytes = 0;
};

inline std::optional<PaddedShape> padded_shape(const TensorEntry& entry) {
  if (entry.shape.size() < 2) return std::nullopt;
  PaddedShape shape{
      .row_count = 1, .length = static_cast<size_t>(entry.shape.back()), .item_bytes = dtype_bytes(entry.dtype)};
  for (size_t dim = 0; dim + 1 < entry.shape.size(); ++dim) shape.row_count *= static_cast<size_t>(entry.shape[dim]);
  if (shape.item_bytes > sizeof(uint64_t) || shape.length < 2 || shape.row_count < 1) return std::nullopt;
  if (shape.length > std::numeric_limits<uint32_t>::max()) return std::nullopt;
  return shape;
}

}  // namespace penstock::wire
