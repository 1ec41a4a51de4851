// SPDX-License-Identifier: Apache-2.0
// Tensors that are written with fewer bytes, as a trainer widens them, at once or by the threads of a device. In front
// stand the encoding, the dtype and the sizes of the tensor.
#include <array>
#include <cstring>
#include <numeric>

#include "../cpp/wire/widen_grid.h"
#include "fuzz_target.h"
#include "wire/narrow.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kHeadBytes = 4;
constexpr DTypeCode kInt64 = 4, kBool = 11;

TensorEntry entry_of(DTypeCode dtype, int64_t rows, int64_t length) {
  TensorEntry entry{.dtype = dtype, .shape = {rows, length}, .strides = {length, 1}};
  entry.bytes = plain_bytes(entry);
  return entry;
}

Bytes make(const TensorEntry& entry, const Bytes& plain) {
  const auto form = narrowest_form(entry, plain);
  expect(form.has_value(), "the samples can be written narrow");
  Bytes bytes(kHeadBytes + form->bytes);
  bytes[0] = static_cast<std::byte>(form->encoding);
  bytes[1] = static_cast<std::byte>(entry.dtype);
  bytes[2] = static_cast<std::byte>(entry.shape[0]);
  bytes[3] = static_cast<std::byte>(entry.shape[1]);
  Bytes narrow(form->bytes);
  write_narrow(*form, entry, plain, narrow);
  std::copy(narrow.begin(), narrow.end(), bytes.begin() + kHeadBytes);
  return bytes;
}

Bytes longs(int64_t rows, int64_t length, int64_t (*value)(int64_t row, int64_t place)) {
  Bytes bytes;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t place = 0; place < length; ++place) {
      const int64_t one = value(row, place);
      const auto* const its = reinterpret_cast<const std::byte*>(&one);
      bytes.insert(bytes.end(), its, its + sizeof one);
    }
  return bytes;
}

constexpr int64_t kFar = 0x000123456789abcd;  // times a number, it needs most of its bits

}  // namespace

std::vector<Bytes> make_seeds() {
  Bytes bools(16 * 200);
  for (size_t place = 0; place < bools.size(); ++place) bools[place] = static_cast<std::byte>(place % 3 == 0);
  return {make(entry_of(kInt64, 16, 32), longs(16, 32, [](int64_t row, int64_t place) { return row * 32 + place; })),
          make(entry_of(kInt64, 16, 32),
               longs(16, 32, [](int64_t row, int64_t place) { return place < row ? kFar * (row * 32 + place) : 7; })),
          make(entry_of(kInt64, 16, 32),
               longs(16, 32, [](int64_t row, int64_t place) { return kFar * (row % 3 * 32 + place); })),
          make(entry_of(kBool, 16, 200), bools)};
}

// Gives repeated rows the length that their number asks for, and has one of them name any row.
void mend_rows(Bytes& bytes, Choices& choices) {
  const auto rows = static_cast<size_t>(bytes[2]), length = static_cast<size_t>(bytes[3]);
  const uint32_t distinct_count = static_cast<uint32_t>(choices.below(rows + 1)), place = choices.below(2 * rows + 1);
  const size_t indices_at = kHeadBytes + sizeof distinct_count;
  const size_t row_bytes = length * dtype_bytes(static_cast<DTypeCode>(bytes[1]));
  bytes.resize(indices_at + rows * sizeof place + distinct_count * row_bytes);
  std::memcpy(bytes.data() + kHeadBytes, &distinct_count, sizeof distinct_count);
  if (rows > 0) std::memcpy(bytes.data() + indices_at + choices.below(rows) * sizeof place, &place, sizeof place);
}

// Gives the elements of some padded rows to another, which may then be longer than the tensor's.
void mend_lengths(Bytes& bytes, Choices& choices) {
  const auto rows = static_cast<size_t>(bytes[2]);
  const size_t lengths_at = kHeadBytes + sizeof(uint64_t);
  if (rows == 0 || bytes.size() < lengths_at + rows * sizeof(uint32_t)) return;
  std::vector<uint32_t> lengths(rows);
  std::memcpy(lengths.data(), bytes.data() + lengths_at, rows * sizeof(uint32_t));
  uint32_t& given = lengths[choices.below(rows)];
  for (uint32_t& length : lengths) {
    if (&length == &given || choices.below(2) == 0) continue;
    given += length;
    length = 0;
  }
  std::memcpy(bytes.data() + lengths_at, lengths.data(), rows * sizeof(uint32_t));
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < kHeadBytes) bytes.resize(kHeadBytes);
  if (choices.mostly()) bytes[0] = static_cast<std::byte>(2 + static_cast<unsigned>(bytes[0]) % 6);
  if (choices.mostly()) bytes[1] = choices.one_of({std::byte{kInt64}, std::byte{kBool}, std::byte{3}, std::byte{2}});
  if (choices.mostly()) bytes[2] &= std::byte{0x1f};
  if (static_cast<Encoding>(bytes[0]) == Encoding::kRows && choices.mostly()) mend_rows(bytes, choices);
  if (static_cast<Encoding>(bytes[0]) == Encoding::kPadded && choices.below(4) == 0) mend_lengths(bytes, choices);
}

bool check(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeadBytes) return false;
  const auto encoding = static_cast<Encoding>(bytes[0]);
  const auto dtype = static_cast<DTypeCode>(bytes[1]);
  if (!is_narrow(encoding) || encoding > Encoding::kPadded || dtype_bytes(dtype) == 0) return false;
  const auto rows = static_cast<int64_t>(bytes[2]), length = static_cast<int64_t>(bytes[3]);
  if (!span_bytes(dtype, std::array{rows, length}, std::array{length, int64_t{1}})) return false;  // above the cap
  TensorEntry entry = entry_of(dtype, rows, length);
  const uint64_t plain = entry.bytes;
  entry.encoding = encoding;
  entry.bytes = bytes.size() - kHeadBytes;
  // In memory of exactly its size, and as well aligned as in a slab.
  const Bytes narrow(bytes.begin() + kHeadBytes, bytes.end());
  Bytes wide(plain);
  const auto checked = check_narrow(entry, narrow);
  if (const auto widened = widen(entry, narrow, wide); !widened) {
    expect(!checked, "what is refused when it is widened is refused before it is copied to a device");
    return is_refused(widened.error().message);
  }
  touch(wide);
  expect(static_cast<bool>(checked), "what can be widened may be copied to a device");
  Bytes on_device(plain);
  widen_on_grid(checked.value(), narrow.data(), on_device.data());
  expect(on_device == wide, "a device widens to the same");
  // What can be read can be written again and reads the same.
  TensorEntry again = entry;
  again.encoding = Encoding::kPlain;
  again.bytes = plain;
  const auto form = narrowest_form(again, wide);
  if (!form) return true;
  Bytes rewritten(form->bytes);
  write_narrow(*form, again, wide, rewritten);
  again.encoding = form->encoding;
  again.bytes = form->bytes;
  Bytes reread(plain);
  expect(static_cast<bool>(widen(again, rewritten, reread)) && reread == wide, "written again, it reads the same");
  return true;
}

}  // namespace penstock::fuzz
