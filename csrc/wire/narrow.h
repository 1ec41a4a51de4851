// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lossless encodings that write tensors with fewer bytes, for a link that is slower than the encoding:
//
//   offset   integers as unsigned ones of 8, 16 or 32 bits above a base
//   bits     bools as one bit each
//   rows     each distinct row once, and for each row the index of its distinct row
//   padded   rows that end in the same value, such as padded token ids: their lengths, and the values before the end
//
// The encoding of a tensor is chosen for each batch separately, by its values; a tensor that fits none, or gains too
// little, is written unchanged, and so is a tensor that is not contiguous. PROTOCOL.md has the bytes.
//
// A trainer widens the tensor again, in one call or, with a Widening, element by element on a device.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>

#include "base/result.h"
#include "wire/frame.h"

namespace penstock::wire {

// Bytes of the base in front of the offsets.
constexpr uint64_t kBaseBytes = 8;

// Bytes of this many bools, one bit each.
constexpr uint64_t bit_bytes(uint64_t count) { return (count + 7) / 8; }

// Smaller tensors are not worth examining.
constexpr uint64_t kNarrowBytesMin = 2048;

// A way to write a tensor.
struct NarrowForm {
  Encoding encoding = Encoding::kPlain;
  uint64_t bytes = 0;     // written in this form
  int64_t base = 0;       // of offset: the smallest value
  uint64_t pad_item = 0;  // of padded: the bytes of the value at the end of rows

  friend bool operator==(const NarrowForm&, const NarrowForm&) = default;
};

// The smallest form for these bytes, which belong to a tensor with that entry; empty if the tensor has holes or no form
// is smaller.
std::optional<NarrowForm> narrowest_form(const TensorEntry& entry, std::span<const std::byte> bytes);

// Writes the tensor to `target`, of `form.bytes` bytes; narrowest_form() must have returned `form` for the same bytes.
void write_narrow(const NarrowForm& form, const TensorEntry& entry, std::span<const std::byte> bytes,
                  std::span<std::byte> target);

// Whether all bytes are valid bools, 0 or 1.
bool are_bools(std::span<const std::byte> bytes);

// Turns arbitrary bytes into bools: 0 stays 0, all others become 1.
void make_bools(std::span<std::byte> bytes);

// Writes the decoded tensor to `target`, which has plain_bytes(entry). `narrow` contains the bytes in the entry's
// encoding. kMalformed if they do not belong to such a tensor.
Result<void> widen(const TensorEntry& entry, std::span<const std::byte> narrow, std::span<std::byte> target);

// Describes a tensor that is written with fewer bytes for code that widens it element by element, such as the kernel
// threads of a device (widen_thread.h). The narrow bytes contain the rest. check_narrow() checks them before that code
// runs: it trusts every number that it reads.
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

// Checks the narrow bytes of a tensor, which must not be modified from now on; widen() starts with this check. Reads
// one number for each row, and no elements.
Result<Widening> check_narrow(const TensorEntry& entry, std::span<const std::byte> narrow);

// Whether a tensor of bools is widened only to 0 and 1. `widening` is the result of its check.
bool widens_to_bools(const Widening& widening, std::span<const std::byte> narrow);

}  // namespace penstock::wire
