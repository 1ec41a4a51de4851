// SPDX-License-Identifier: Apache-2.0
#pragma once
// A batch record and its payload in one contiguous buffer, for values that are sent as a whole: the body of a prefix
// request, or a separate value. PROTOCOL.md has the bytes.

#include <cstddef>
#include <span>
#include <vector>

#include "base/result.h"
#include "wire/frame.h"

namespace penstock::wire {

// The views point into the bytes that were read.
struct PackedRecord {
  Frame frame;
  std::span<const std::byte> record;
  std::span<const std::byte> payload;

  std::span<const std::byte> bytes_of(const TensorEntry& entry) const {
    return payload.subspan(entry.offset, entry.bytes);
  }
};

// Lays out the tensors of `frame` one after the other and copies in their bytes from `sources`, in the same order.
std::vector<std::byte> write_packed_record(Frame frame, std::span<const std::span<const std::byte>> sources);

// The tensors of a packed record do not share bytes, so that copies of them take no more memory than the record.
Result<PackedRecord> parse_packed_record(std::span<const std::byte> bytes);

}  // namespace penstock::wire
