// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that are written with fewer bytes than they have, without a loss, for a link that is slower than the writing:
//
//   offset   integers as unsigned ones of 8, 16 or 32 bits above a base
//   bits     bools as one bit each
//   rows     rows that repeat once, and for each row which one it is
//   padded   rows that end in the same value, such as padded token ids: their lengths, and the values before the end
//
// Which of them a tensor is written in is decided anew for each batch, by its values; a tensor that fits none, or gains
// too little, is written as it is. A tensor's elements lie side by side, or it is written as it is. PROTOCOL.md has the
// bytes.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/result.h"
#include "wire/frame.h"

namespace penstock::wire {

// Smaller tensors are not worth a look.
constexpr uint64_t kNarrowBytesMin = 2048;

// How a tensor can be written.
struct NarrowForm {
  Encoding encoding = Encoding::kPlain;
  uint64_t bytes = 0;     // then
  int64_t base = 0;       // of offset: the smallest value
  uint64_t pad_item = 0;  // of padded: the bytes of the value at the end of rows

  friend bool operator==(const NarrowForm&, const NarrowForm&) = default;
};

// The smallest form for these bytes, which are those of a tensor with that entry; none where it has holes, and none
// that is smaller.
std::optional<NarrowForm> narrowest_form(const TensorEntry& entry, std::span<const std::byte> bytes);

// Writes the tensor in that form, which narrowest_form() gave for the same bytes, to `target` of `form.bytes`.
void write_narrow(const NarrowForm& form, const TensorEntry& entry, std::span<const std::byte> bytes,
                  std::span<std::byte> target);

// Whether all bytes are those of bools, 0 or 1.
bool are_bools(std::span<const std::byte> bytes);

// Makes bools of any bytes: 1 of all but 0.
void make_bools(std::span<std::byte> bytes);

// Writes the tensor's own bytes to `target`, which has plain_bytes(entry). `narrow` are the bytes of the entry's
// encoding. kMalformed where these do not belong to such a tensor.
Result<void> widen(const TensorEntry& entry, std::span<const std::byte> narrow, std::span<std::byte> target);

}  // namespace penstock::wire
