// SPDX-License-Identifier: Apache-2.0
#include "wire/widening.h"

#include <cstring>

#include "base/bytes.h"
#include "wire/narrow.h"
#include "wire/narrow_shape.h"

namespace penstock::wire {
namespace {

// The integer types that may have an offset.
constexpr bool may_have_offset(DTypeCode dtype) { return (dtype >= 2 && dtype <= 4) || dtype == 27 || dtype == 28; }

Result<Widening> check_offset(const TensorEntry& entry, uint64_t plain, std::span<const std::byte> narrow) {
  if (!may_have_offset(entry.dtype)) return malformed_narrow("its elements are not integers");
  Widening widening{.encoding = entry.encoding, .item_bytes = dtype_bytes(entry.dtype)};
  widening.item_count = plain / widening.item_bytes;
  if (narrow.size() != kBaseBytes + widening.item_count * offset_bytes(entry.encoding))
    return malformed_narrow("its length does not match its elements");
  std::memcpy(&widening.constant, narrow.data(), kBaseBytes);
  return widening;
}

Result<Widening> check_bits(const TensorEntry& entry, uint64_t plain, std::span<const std::byte> narrow) {
  if (entry.dtype != kDTypeBool) return malformed_narrow("its elements are not bools");
  if (narrow.size() != bit_bytes(plain)) return malformed_narrow("its length does not match its elements");
  return Widening{.encoding = entry.encoding, .item_bytes = 1, .item_count = plain};
}

// Rows start at a multiple of 4 in the narrow bytes.
constexpr uint32_t unit_bytes(uint64_t row_bytes) { return row_bytes % 4 == 0 ? 4 : row_bytes % 2 == 0 ? 2 : 1; }

Result<Widening> check_rows(const TensorEntry& entry, uint64_t plain, std::span<const std::byte> narrow) {
  const size_t row_count = row_count_of(entry);
  ByteReader reader(narrow);
  const auto distinct_count = reader.read<uint32_t>();
  const auto indices = reader.take(row_count * sizeof(uint32_t));
  if (!reader.ok() || row_count == 0) return malformed_narrow("its length does not match its rows");
  const uint64_t row_bytes = plain / row_count;
  if (!are_rows_there(reader.remaining(), distinct_count, row_bytes))
    return malformed_narrow("its length does not match its rows");
  for (size_t row = 0; row < row_count; ++row) {
    uint32_t index = 0;
    std::memcpy(&index, indices.data() + row * sizeof index, sizeof index);
    if (index >= distinct_count) return malformed_narrow("it refers to a missing row");
  }
  const uint32_t item_bytes = unit_bytes(row_bytes);
  return Widening{.encoding = entry.encoding,
                  .item_bytes = item_bytes,
                  .item_count = plain / item_bytes,
                  .row_count = row_count,
                  .row_items = row_bytes / item_bytes};
}

Result<Widening> check_padded(const TensorEntry& entry, uint64_t plain, std::span<const std::byte> narrow) {
  const auto shape = padded_shape(entry);
  if (!shape) return malformed_narrow("it has no rows with equal endings");
  ByteReader reader(narrow);
  const auto pad_item = reader.read<uint64_t>();
  const auto lengths = reader.take(shape->row_count * sizeof(uint32_t));
  if (!reader.ok()) return malformed_narrow("its length does not match its rows");
  uint64_t kept_count = 0;
  for (size_t row = 0; row < shape->row_count; ++row) {
    uint32_t length = 0;
    std::memcpy(&length, lengths.data() + row * sizeof length, sizeof length);
    if (length > shape->length) return malformed_narrow("one of its rows is longer than the tensor's rows");
    kept_count += length;
  }
  if (reader.remaining() != kept_count * shape->item_bytes)
    return malformed_narrow("its length does not match its rows");
  return Widening{.encoding = entry.encoding,
                  .item_bytes = static_cast<uint32_t>(shape->item_bytes),
                  .item_count = plain / shape->item_bytes,
                  .constant = pad_item,
                  .row_count = shape->row_count,
                  .row_items = shape->length};
}

}  // namespace

Result<Widening> check_narrow(const TensorEntry& entry, std::span<const std::byte> narrow) {
  PENSTOCK_ASSERT(is_narrow(entry.encoding));
  if (!is_contiguous(entry)) return malformed_narrow("its elements are not contiguous");
  const uint64_t plain = plain_bytes(entry);
  if (plain == 0) return malformed_narrow("it has no elements");
  switch (entry.encoding) {
    case Encoding::kBits: return check_bits(entry, plain, narrow);
    case Encoding::kRows: return check_rows(entry, plain, narrow);
    case Encoding::kPadded: return check_padded(entry, plain, narrow);
    default: return check_offset(entry, plain, narrow);
  }
}

bool widens_to_bools(const Widening& widening, std::span<const std::byte> narrow) {
  const size_t numbers = widening.row_count * sizeof(uint32_t);  // of rows, or their lengths
  switch (widening.encoding) {
    case Encoding::kRows: return are_bools(narrow.subspan(sizeof(uint32_t) + numbers));
    case Encoding::kPadded:
      return (widening.constant & 0xff) <= 1 && are_bools(narrow.subspan(sizeof widening.constant + numbers));
    default: return true;  // bits
  }
}

}  // namespace penstock::wire
