// SPDX-License-Identifier: Apache-2.0
#pragma once
// Describes a tensor that is written with fewer bytes (narrow.h) for code that widens it element by element, such as
// the kernels of a device (widen_thread.h). The narrow bytes are checked here, before that code runs: it trusts every
// number that it reads.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "base/result.h"
#include "wire/frame.h"

namespace penstock::wire {

// A kernel thread's description of a tensor. The narrow bytes contain the rest.
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
static_assert(std::is_trivially_copyable_v<Widening>, "kernels receive it by value");

// Checks the narrow bytes of a tensor, which must not be modified from now on. kMalformed exactly if wire::widen()
// rejects them. Reads one number for each row, and no elements.
Result<Widening> check_narrow(const TensorEntry& entry, std::span<const std::byte> narrow);

// Whether a tensor of bools is widened only to 0 and 1. `widening` is the result of its check.
bool widens_to_bools(const Widening& widening, std::span<const std::byte> narrow);

}  // namespace penstock::wire
