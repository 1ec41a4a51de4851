// SPDX-License-Identifier: Apache-2.0
#pragma once
// The dtypes of numpy arrays that have no tensor dtype: text, bytes, dates, other byte orders. A dtype is written in
// the form of numpy's `dtype.str`: byte order, kind and element size.

#include <cstdint>
#include <optional>
#include <string_view>

#include "wire/dtype.h"

namespace penstock::wire {

constexpr uint32_t kArrayDtypeBytesMax = 64;

// Bytes of one element; empty if the text is not a dtype of plain numbers, text, bytes or dates. Objects, structures
// and compound dtypes are never included: their elements are, or may be, addresses.
std::optional<uint64_t> array_item_bytes(std::string_view dtype);

// Whether numpy supports the dtype of a tensor.
constexpr bool is_numpy_dtype(DTypeCode code) {
  // Not the 16-bit complex (8) and bfloat16 (15), nor the 8-bit floats (23 to 26).
  return code <= 7 || (code >= 9 && code <= 11) || (code >= 27 && code <= 29);
}

}  // namespace penstock::wire
