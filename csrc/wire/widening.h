// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a tensor that is written with fewer bytes (narrow.h) is widened by code that works element by element, as the
// kernels of a device do (widen_thread.h). The narrow bytes are checked here, before any of that code runs: it trusts
// every number that it reads.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "base/result.h"
#include "wire/frame.h"

namespace penstock::wire {

// What a thread of a kernel knows of a tensor. The narrow bytes have the rest.
struct Widening {
  Encoding encoding = Encoding::kPlain;
  uint32_t item_bytes = 0;  // of an element; of rows: of the units in which they are copied, 1, 2 or 4
  uint64_t item_count = 0;  // of the tensor
  uint64_t constant = 0;    // of offset: the base; of padded: the bytes of the value at the end of rows
  uint64_t row_count = 0;   // of rows and padded
  uint64_t row_items = 0;   // in each row

  uint64_t plain_bytes() const { return item_count * item_bytes; }

  friend bool operator==(const Widening&, const Widening&) = default;
};
static_assert(std::is_trivially_copyable_v<Widening>, "kernels are given it by value");

// Checks the narrow bytes of a tensor, which nobody may write to from now on. kMalformed exactly where wire::widen()
// refuses them. Looks at one number for each row, and at no element.
Result<Widening> check_narrow(const TensorEntry& entry, std::span<const std::byte> narrow);

// Whether a tensor of bools is widened to 0 and 1 alone. `widening` is its check's.
bool widens_to_bools(const Widening& widening, std::span<const std::byte> narrow);

}  // namespace penstock::wire
