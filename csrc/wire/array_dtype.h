// SPDX-License-Identifier: Apache-2.0
#pragma once
// The dtypes of numpy arrays that are not a tensor's: text, bytes, dates, other byte orders. A dtype is written as
// numpy's `dtype.str` has it: a byte order, a kind, and how large an element is.

#include <cstdint>
#include <optional>
#include <string_view>

#include "wire/dtype.h"

namespace penstock::wire {

constexpr uint32_t kArrayDtypeBytesMax = 64;

// Bytes of one element, or nothing for a text that is no dtype of plain numbers, text, bytes or dates. Objects,
// structures and several dtypes in one are never among them: the elements of those are, or may be, addresses.
std::optional<uint64_t> array_item_bytes(std::string_view dtype);

// Whether numpy has the dtype of a tensor.
constexpr bool is_numpy_dtype(DTypeCode code) {
  // Not the 16-bit complex (8) and bfloat16 (15), nor the 8-bit floats (23 to 26).
  return code <= 7 || (code >= 9 && code <= 11) || (code >= 27 && code <= 29);
}

}  // namespace penstock::wire
