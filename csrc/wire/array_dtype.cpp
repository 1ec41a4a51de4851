// SPDX-License-Identifier: Apache-2.0
#include "wire/array_dtype.h"

#include <algorithm>
#include <charconv>

namespace penstock::wire {
namespace {

constexpr uint64_t kItemBytesMax = 0x7fffffff;  // numpy's limit

bool is_letter_or_digit(char character) {
  return (character >= 'a' && character <= 'z') || (character >= 'A' && character <= 'Z') ||
         (character >= '0' && character <= '9');
}

// "[ns]", "[25s]", or empty for a date that has no unit yet.
bool is_date_unit(std::string_view text) {
  if (text.empty()) return true;
  if (text.size() < 3 || text.front() != '[' || text.back() != ']') return false;
  return std::ranges::all_of(text.substr(1, text.size() - 2), is_letter_or_digit);
}

// Whether elements of a kind may have this size. numpy itself rejects number types that this machine does not support.
bool has_size(char kind, uint64_t bytes) {
  switch (kind) {
    case 'b': return bytes == 1;
    case 'i':
    case 'u': return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8;
    case 'f': return bytes == 2 || bytes == 4 || bytes == 8 || bytes == 12 || bytes == 16;
    case 'c': return bytes == 8 || bytes == 16 || bytes == 24 || bytes == 32;
    case 'm':
    case 'M': return bytes == 8;
    default: return kind == 'S' || kind == 'U' || kind == 'V';
  }
}

}  // namespace

std::optional<uint64_t> array_item_bytes(std::string_view dtype) {
  if (dtype.size() < 3 || dtype.size() > kArrayDtypeBytesMax) return std::nullopt;
  const char order = dtype[0];
  const char kind = dtype[1];
  if (order != '<' && order != '>' && order != '|') return std::nullopt;
  uint64_t bytes = 0;
  const char* const end = dtype.data() + dtype.size();
  const auto [rest, error] = std::from_chars(dtype.data() + 2, end, bytes);
  if (error != std::errc() || bytes > kItemBytesMax) return std::nullopt;
  const bool is_date = kind == 'm' || kind == 'M';
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  if (!has_size(kind, bytes) || !(is_date ? is_date_unit(unit) : unit.empty())) return std::nullopt;
  if (kind == 'U') bytes *= 4;  // the size is in characters
  return bytes <= kItemBytesMax ? std::optional(bytes) : std::nullopt;
}

}  // namespace penstock::wire
