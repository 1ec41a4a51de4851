// SPDX-License-Identifier: Apache-2.0
#include "wire/narrow.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bytes.h"

// The loops over elements are also compiled for the wider registers of newer CPUs; the system's loader selects the
// version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define PENSTOCK_WIDE_LOOP __attribute__((target_clones("avx2", "default")))
#else
#define PENSTOCK_WIDE_LOOP
#endif

namespace penstock::wire {
namespace {

constexpr uint64_t kRowBytesMin = 64;

Fault malformed_narrow(std::string_view reason) { return malformed("a compressed tensor", reason); }

// Whether its elements are contiguous in the order of its dimensions.
bool is_contiguous(const TensorEntry& entry) {
  int64_t expected = 1;
  for (size_t dim = entry.shape.size(); dim-- > 0;) {
    if (entry.shape[dim] != 1 && entry.strides[dim] != expected) return false;
    expected *= entry.shape[dim];
  }
  return true;
}

// Bytes of an offset.
constexpr uint64_t offset_bytes(Encoding encoding) {
  return encoding == Encoding::kOffset8 ? 1 : encoding == Encoding::kOffset16 ? 2 : 4;
}

// Rows of the encoding kRows: the first dimension.
size_t row_count_of(const TensorEntry& entry) {
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

std::optional<PaddedShape> padded_shape(const TensorEntry& entry) {
  if (entry.shape.size() < 2) return std::nullopt;
  PaddedShape shape{
      .row_count = 1, .length = static_cast<size_t>(entry.shape.back()), .item_bytes = dtype_bytes(entry.dtype)};
  for (size_t dim = 0; dim + 1 < entry.shape.size(); ++dim) shape.row_count *= static_cast<size_t>(entry.shape[dim]);
  if (shape.item_bytes > sizeof(uint64_t) || shape.length < 2 || shape.row_count < 1) return std::nullopt;
  if (shape.length > std::numeric_limits<uint32_t>::max()) return std::nullopt;
  return shape;
}

// Calls on_type with a value of the integer type; returns false if the code is not a type that may have an offset.
template <typename OnType>
bool with_integer(DTypeCode dtype, const OnType& on_type) {
  switch (dtype) {
    case 2: on_type(int16_t{}); return true;
    case 3: on_type(int32_t{}); return true;
    case 4: on_type(int64_t{}); return true;
    case 27: on_type(uint16_t{}); return true;
    case 28: on_type(uint32_t{}); return true;
    default: return false;
  }
}

template <typename OnType>
void with_width(Encoding encoding, const OnType& on_type) {
  if (encoding == Encoding::kOffset8) return on_type(uint8_t{});
  if (encoding == Encoding::kOffset16) return on_type(uint16_t{});
  on_type(uint32_t{});
}

#define PENSTOCK_DEFINE_LIMITS(T)                                               \
  PENSTOCK_WIDE_LOOP std::pair<T, T> limits_of(const T* values, size_t count) { \
    T least = values[0], most = values[0];                                      \
    for (size_t place = 1; place < count; ++place) {                            \
      least = values[place] < least ? values[place] : least;                    \
      most = values[place] > most ? values[place] : most;                       \
    }                                                                           \
    return {least, most};                                                       \
  }
PENSTOCK_DEFINE_LIMITS(int16_t)
PENSTOCK_DEFINE_LIMITS(int32_t)
PENSTOCK_DEFINE_LIMITS(int64_t)
PENSTOCK_DEFINE_LIMITS(uint16_t)
PENSTOCK_DEFINE_LIMITS(uint32_t)
#undef PENSTOCK_DEFINE_LIMITS

// Differences are taken modulo 2^64, so that no integer overflows.
// NOLINTBEGIN(bugprone-macro-parentheses): a type takes none
#define PENSTOCK_DEFINE_OFFSETS(T, N)                                                                    \
  PENSTOCK_WIDE_LOOP void take_base(const T* values, size_t count, uint64_t base, N* target) {           \
    for (size_t place = 0; place < count; ++place)                                                       \
      target[place] = static_cast<N>(static_cast<uint64_t>(values[place]) - base);                       \
  }                                                                                                      \
  PENSTOCK_WIDE_LOOP void add_base(const N* values, size_t count, uint64_t base, T* target) {            \
    for (size_t place = 0; place < count; ++place) target[place] = static_cast<T>(values[place] + base); \
  }
#define PENSTOCK_DEFINE_OFFSETS_OF(T)  \
  PENSTOCK_DEFINE_OFFSETS(T, uint8_t)  \
  PENSTOCK_DEFINE_OFFSETS(T, uint16_t) \
  PENSTOCK_DEFINE_OFFSETS(T, uint32_t)
PENSTOCK_DEFINE_OFFSETS_OF(int16_t)
PENSTOCK_DEFINE_OFFSETS_OF(int32_t)
PENSTOCK_DEFINE_OFFSETS_OF(int64_t)
PENSTOCK_DEFINE_OFFSETS_OF(uint16_t)
PENSTOCK_DEFINE_OFFSETS_OF(uint32_t)
#undef PENSTOCK_DEFINE_OFFSETS_OF
#undef PENSTOCK_DEFINE_OFFSETS
// NOLINTEND(bugprone-macro-parentheses)

PENSTOCK_WIDE_LOOP uint8_t bits_of(const uint8_t* values, size_t count) {
  uint8_t all = 0;
  for (size_t place = 0; place < count; ++place) all |= values[place];
  return all;
}

PENSTOCK_WIDE_LOOP void write_bools(uint8_t* values, size_t count) {
  for (size_t place = 0; place < count; ++place) values[place] = values[place] != 0;
}

template <typename T>
const T* as(std::span<const std::byte> bytes) {
  return reinterpret_cast<const T*>(bytes.data());
}
template <typename T>
T* as(std::span<std::byte> bytes) {
  return reinterpret_cast<T*>(bytes.data());
}

// ---- Offset

std::optional<NarrowForm> offset_form(const TensorEntry& entry, std::span<const std::byte> bytes) {
  std::optional<NarrowForm> form;
  with_integer(entry.dtype, [&](auto type) {
    using T = decltype(type);
    const size_t count = bytes.size() / sizeof(T);
    const auto [least, most] = limits_of(as<T>(bytes), count);
    const uint64_t range = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
    for (const Encoding encoding : {Encoding::kOffset8, Encoding::kOffset16, Encoding::kOffset32}) {
      const uint64_t width = offset_bytes(encoding);
      if (width >= sizeof(T)) break;
      if (range >> (8 * width) != 0) continue;
      form = {.encoding = encoding, .bytes = kBaseBytes + count * width, .base = static_cast<int64_t>(least)};
      break;
    }
  });
  return form;
}

void write_offset(const NarrowForm& form, const TensorEntry& entry, std::span<const std::byte> bytes,
                  std::span<std::byte> target) {
  std::memcpy(target.data(), &form.base, kBaseBytes);
  with_integer(entry.dtype, [&](auto type) {
    using T = decltype(type);
    with_width(form.encoding, [&](auto narrow) {
      using N = decltype(narrow);
      take_base(as<T>(bytes), bytes.size() / sizeof(T), static_cast<uint64_t>(form.base),
                as<N>(target.subspan(kBaseBytes)));
    });
  });
}

void widen_offset(const TensorEntry& entry, const Widening& widening, std::span<const std::byte> narrow,
                  std::span<std::byte> target) {
  with_integer(entry.dtype, [&](auto type) {
    using T = decltype(type);
    with_width(entry.encoding, [&](auto type_of_narrow) {
      using N = decltype(type_of_narrow);
      add_base(as<N>(narrow.subspan(kBaseBytes)), widening.item_count, widening.constant, as<T>(target));
    });
  });
}

// ---- Bits

void write_bits(std::span<const std::byte> bytes, std::span<std::byte> target) {
  for (size_t place = 0; place < target.size(); ++place) {
    uint64_t eight = 0;
    std::memcpy(&eight, bytes.data() + place * 8, std::min<size_t>(8, bytes.size() - place * 8));
    // Packs the lowest bit of each byte.
    target[place] = static_cast<std::byte>((eight * 0x0102040810204080ull) >> 56);
  }
}

void widen_bits(std::span<const std::byte> narrow, std::span<std::byte> target) {
  for (size_t place = 0; place < narrow.size(); ++place) {
    const auto eight = static_cast<uint64_t>(narrow[place]);
    // Moves bit k to byte k.
    const uint64_t spread = ((eight * 0x8040201008040201ull) >> 7) & 0x0101010101010101ull;
    const uint64_t in_order = __builtin_bswap64(spread);
    std::memcpy(target.data() + place * 8, &in_order, std::min<size_t>(8, target.size() - place * 8));
  }
}

// ---- Rows

std::string_view row_of(std::span<const std::byte> bytes, uint64_t row_bytes, size_t row) {
  return {reinterpret_cast<const char*>(bytes.data()) + row * row_bytes, row_bytes};
}

// By row, the first row with the same bytes; empty if all rows differ.
std::optional<std::vector<uint32_t>> equal_rows(std::span<const std::byte> bytes, size_t row_count) {
  const uint64_t row_bytes = bytes.size() / row_count;
  std::unordered_map<std::string_view, uint32_t> heads;  // comparing the first bytes of rows usually suffices
  for (uint32_t row = 0; row < row_count; ++row)
    heads.try_emplace(row_of(bytes, row_bytes, row).substr(0, kRowBytesMin), row);
  if (heads.size() == row_count) return std::nullopt;
  std::unordered_map<std::string_view, uint32_t> seen;
  std::vector<uint32_t> first(row_count);
  for (uint32_t row = 0; row < row_count; ++row)
    first[row] = seen.try_emplace(row_of(bytes, row_bytes, row), row).first->second;
  if (seen.size() == row_count) return std::nullopt;
  return first;
}

std::optional<NarrowForm> rows_form(const TensorEntry& entry, std::span<const std::byte> bytes) {
  const size_t row_count = row_count_of(entry);
  if (row_count < 2 || row_count > std::numeric_limits<uint32_t>::max()) return std::nullopt;
  const uint64_t row_bytes = bytes.size() / row_count;
  if (row_bytes < kRowBytesMin) return std::nullopt;
  const auto first = equal_rows(bytes, row_count);
  if (!first) return std::nullopt;
  uint64_t distinct_count = 0;
  for (uint32_t row = 0; row < row_count; ++row) distinct_count += (*first)[row] == row;
  return NarrowForm{.encoding = Encoding::kRows,
                    .bytes = sizeof(uint32_t) * (1 + row_count) + distinct_count * row_bytes};
}

void write_rows(const TensorEntry& entry, std::span<const std::byte> bytes, std::span<std::byte> target) {
  const size_t row_count = row_count_of(entry);
  const uint64_t row_bytes = bytes.size() / row_count;
  const auto first = equal_rows(bytes, row_count);
  PENSTOCK_ASSERT(first, "the rows do not repeat");
  std::vector<uint32_t> place_of(row_count);
  std::byte* const indices = target.data() + sizeof(uint32_t);
  std::byte* rows = indices + sizeof(uint32_t) * row_count;
  uint32_t distinct_count = 0;
  for (uint32_t row = 0; row < row_count; ++row) {
    if ((*first)[row] == row) {
      place_of[row] = distinct_count++;
      std::memcpy(rows, bytes.data() + row * row_bytes, row_bytes);
      rows += row_bytes;
    }
    std::memcpy(indices + row * sizeof(uint32_t), &place_of[(*first)[row]], sizeof(uint32_t));
  }
  std::memcpy(target.data(), &distinct_count, sizeof distinct_count);
}

void widen_rows(const Widening& widening, std::span<const std::byte> narrow, std::span<std::byte> target) {
  const uint64_t row_bytes = widening.row_items * widening.item_bytes;
  const std::byte* const indices = narrow.data() + sizeof(uint32_t);
  const std::byte* const rows = indices + widening.row_count * sizeof(uint32_t);
  for (size_t row = 0; row < widening.row_count; ++row) {
    uint32_t index = 0;
    std::memcpy(&index, indices + row * sizeof index, sizeof index);
    std::memcpy(target.data() + row * row_bytes, rows + index * row_bytes, row_bytes);
  }
}

// ---- Padded

// The number of elements in a row before its trailing padding.
size_t length_before(const std::byte* row, const PaddedShape& shape, const std::byte* pad) {
  size_t length = shape.length;
  while (length > 0 && std::memcmp(row + (length - 1) * shape.item_bytes, pad, shape.item_bytes) == 0) --length;
  return length;
}

std::optional<NarrowForm> padded_form(const TensorEntry& entry, std::span<const std::byte> bytes) {
  const auto shape = padded_shape(entry);
  if (!shape) return std::nullopt;
  const uint64_t row_bytes = shape->length * shape->item_bytes;
  NarrowForm form{.encoding = Encoding::kPadded, .bytes = sizeof(uint64_t) + shape->row_count * sizeof(uint32_t)};
  std::memcpy(&form.pad_item, bytes.data() + row_bytes - shape->item_bytes, shape->item_bytes);
  const auto* pad = reinterpret_cast<const std::byte*>(&form.pad_item);
  for (size_t row = 0; row < shape->row_count; ++row)
    form.bytes += length_before(bytes.data() + row * row_bytes, *shape, pad) * shape->item_bytes;
  return form;
}

void write_padded(const NarrowForm& form, const TensorEntry& entry, std::span<const std::byte> bytes,
                  std::span<std::byte> target) {
  const PaddedShape shape = *padded_shape(entry);
  const uint64_t row_bytes = shape.length * shape.item_bytes;
  std::memcpy(target.data(), &form.pad_item, sizeof form.pad_item);
  std::byte* lengths = target.data() + sizeof form.pad_item;
  std::byte* values = lengths + shape.row_count * sizeof(uint32_t);
  for (size_t row = 0; row < shape.row_count; ++row) {
    const std::byte* const from = bytes.data() + row * row_bytes;
    const auto length =
        static_cast<uint32_t>(length_before(from, shape, reinterpret_cast<const std::byte*>(&form.pad_item)));
    std::memcpy(lengths + row * sizeof length, &length, sizeof length);
    std::memcpy(values, from, length * shape.item_bytes);
    values += length * shape.item_bytes;
  }
}

void widen_padded(const Widening& widening, std::span<const std::byte> narrow, std::span<std::byte> target) {
  const auto* const pad = reinterpret_cast<const std::byte*>(&widening.constant);
  const std::byte* const lengths = narrow.data() + sizeof widening.constant;
  const std::byte* values = lengths + widening.row_count * sizeof(uint32_t);
  std::byte* to = target.data();
  for (size_t row = 0; row < widening.row_count; ++row) {
    uint32_t length = 0;
    std::memcpy(&length, lengths + row * sizeof length, sizeof length);
    const size_t bytes = size_t{length} * widening.item_bytes;
    std::memcpy(to, values, bytes);
    values += bytes;
    to += bytes;
    for (size_t place = length; place < widening.row_items; ++place, to += widening.item_bytes)
      std::memcpy(to, pad, widening.item_bytes);
  }
}

bool is_taken(const NarrowForm& form, uint64_t plain) {
  return form.bytes < plain - plain / 4 && plain / kWidenFactorMax <= form.bytes;
}

}  // namespace

bool are_bools(std::span<const std::byte> bytes) { return bits_of(as<uint8_t>(bytes), bytes.size()) <= 1; }

void make_bools(std::span<std::byte> bytes) { write_bools(as<uint8_t>(bytes), bytes.size()); }

std::optional<NarrowForm> narrowest_form(const TensorEntry& entry, std::span<const std::byte> bytes) {
  PENSTOCK_ASSERT(entry.encoding == Encoding::kPlain && bytes.size() == entry.bytes);
  if (bytes.size() < kNarrowBytesMin || !is_contiguous(entry)) return std::nullopt;
  std::optional<NarrowForm> best;
  const auto consider = [&](const std::optional<NarrowForm>& form) {
    if (form && is_taken(*form, bytes.size()) && (!best || form->bytes < best->bytes)) best = form;
  };
  consider(offset_form(entry, bytes));
  if (entry.dtype == kDTypeBool && are_bools(bytes))
    consider(NarrowForm{.encoding = Encoding::kBits, .bytes = bit_bytes(bytes.size())});
  consider(padded_form(entry, bytes));
  consider(rows_form(entry, bytes));
  return best;
}

void write_narrow(const NarrowForm& form, const TensorEntry& entry, std::span<const std::byte> bytes,
                  std::span<std::byte> target) {
  PENSTOCK_ASSERT(target.size() == form.bytes && is_narrow(form.encoding));
  switch (form.encoding) {
    case Encoding::kBits: return write_bits(bytes, target);
    case Encoding::kRows: return write_rows(entry, bytes, target);
    case Encoding::kPadded: return write_padded(form, entry, bytes, target);
    default: return write_offset(form, entry, bytes, target);
  }
}

namespace {

Result<Widening> check_offset(const TensorEntry& entry, uint64_t plain, std::span<const std::byte> narrow) {
  if (!with_integer(entry.dtype, [](auto) {})) return malformed_narrow("its elements are not integers");
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

Result<void> widen(const TensorEntry& entry, std::span<const std::byte> narrow, std::span<std::byte> target) {
  const auto checked = check_narrow(entry, narrow);
  if (!checked) return checked.error();
  PENSTOCK_ASSERT(target.size() == plain_bytes(entry));
  const Widening& widening = checked.value();
  switch (entry.encoding) {
    case Encoding::kBits: widen_bits(narrow, target); break;
    case Encoding::kRows: widen_rows(widening, narrow, target); break;
    case Encoding::kPadded: widen_padded(widening, narrow, target); break;
    default: widen_offset(entry, widening, narrow, target);
  }
  return {};
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
