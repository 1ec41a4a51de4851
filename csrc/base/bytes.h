// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes: a reader and a writer of binary formats, bytes as text (hexadecimal and base64), a digest that detects
// changes, and secrets that are wiped from memory.

#include <sys/prctl.h>

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace penstock {

// The formats match the memory layout of x86-64 and aarch64, so values are copied without conversion.
static_assert(std::endian::native == std::endian::little, "penstock's formats are little-endian memory images");

template <typename T>
concept PlainNumber = std::is_arithmetic_v<T> || std::is_enum_v<T>;

// Reads a little-endian format, never past its span: the first short read makes it fail permanently, so a parser may
// read a whole record and check ok() once. Thread-compatible.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  bool ok() const { return ok_; }
  size_t position() const { return position_; }
  size_t remaining() const { return ok_ ? bytes_.size() - position_ : 0; }

  template <PlainNumber T>
  T read() {
    T value{};
    if (auto bytes = take(sizeof(T)); ok_) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }

  // Returns the next `count` bytes, or an empty span, after which the reader has failed.
  std::span<const std::byte> take(size_t count) {
    if (!ok_ || count > bytes_.size() - position_) {
      ok_ = false;
      return {};
    }
    auto taken = bytes_.subspan(position_, count);
    position_ += count;
    return taken;
  }

  std::string_view take_text(size_t count) {
    auto bytes = take(count);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

 private:
  std::span<const std::byte> bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

// Writes a little-endian format. Thread-compatible.
class ByteWriter {
 public:
  template <PlainNumber T>
  void write(T value) {
    const size_t place = bytes_.size();
    bytes_.resize(place + sizeof(T));
    std::memcpy(bytes_.data() + place, &value, sizeof(T));
  }

  void write_bytes(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }

  void write_text(std::string_view text) {
    write_bytes({reinterpret_cast<const std::byte*>(text.data()), text.size()});
  }

  size_t size() const { return bytes_.size(); }
  std::span<const std::byte> bytes() const { return bytes_; }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// `value` rounded up to a multiple of `alignment`, which is a power of two.
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }

inline constexpr std::string_view kHexDigits = "0123456789abcdef";

// Appends the two hexadecimal digits of a byte, in lower case.
inline void append_hex(std::string& text, uint8_t byte) {
  text += kHexDigits[byte >> 4];
  text += kHexDigits[byte & 15];
}

// Base64 with padding (RFC 4648, section 4).
std::string to_base64(std::span<const std::byte> bytes);
// Returns none for text that is not base64.
std::optional<std::vector<std::byte>> from_base64(std::string_view text);

// A digest that detects changes of content, at memory speed. Not for content that an adversary chooses.
//
// Four lanes take words in turn. A lane mixes in a word by an operation that is invertible in either argument, so a
// single differing word always changes the digest; several differing words yield the same one only by chance (2^-64).
//
// Thread-compatible.
class ContentDigest {
 public:
  using Value = std::array<uint64_t, 4>;

  void add(uint64_t word) {
    lanes_[turn_] = mixed(lanes_[turn_], word);
    turn_ = (turn_ + 1) % lanes_.size();
  }

  // Adds the bytes and their number, so that the boundary between two neighbours counts.
  void add(std::span<const std::byte> bytes) {
    add(bytes.size());
    size_t place = 0;
    Value lanes = lanes_;  // in registers
    for (; place + sizeof(Value) <= bytes.size(); place += sizeof(Value)) {
      for (size_t lane = 0; lane < lanes.size(); ++lane)
        lanes[lane] = mixed(lanes[lane], word_at(bytes, place + lane * sizeof(uint64_t)));
    }
    lanes_ = lanes;
    for (; place + sizeof(uint64_t) <= bytes.size(); place += sizeof(uint64_t)) add(word_at(bytes, place));
    if (place == bytes.size()) return;
    uint64_t last = 0;
    std::memcpy(&last, bytes.data() + place, bytes.size() - place);
    add(last);
  }

  const Value& value() const { return lanes_; }

 private:
  static uint64_t mixed(uint64_t lane, uint64_t word) {
    lane = (std::rotl(lane, 29) ^ word) * 0x9e3779b97f4a7c15;
    // After one product the last bit of a word still affects only one bit, which the lane's next word could undo.
    return (lane ^ (lane >> 32)) * 0xbf58476d1ce4e5b9;
  }

  static uint64_t word_at(std::span<const std::byte> bytes, size_t place) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + place, sizeof word);
    return word;
  }

  Value lanes_ = {0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0, 0x082efa98ec4e6c89};
  size_t turn_ = 0;
};

// Erases a secret from memory before it is reused. The compiler cannot remove volatile writes, although they are never
// read.
inline void wipe(std::span<std::byte> bytes) {
  volatile std::byte* place = bytes.data();
  for (size_t index = 0; index < bytes.size(); ++index) place[index] = std::byte{0};
}

// An array of bytes that is wiped when it is destroyed, as is each copy of it. Thread-compatible.
template <size_t kSize>
struct WipedArray : std::array<std::byte, kSize> {
  ~WipedArray() { wipe(*this); }
};

// Protects keys in memory from other processes of the same user. Afterwards only root can read or trace this process's
// memory and environment, and the process leaves no core dump. A forked child inherits this; a program that it executes
// does not. The process can still read its own entries in /proc, except files that only their owner may open, such as
// environ.
inline void close_memory() { ::prctl(PR_SET_DUMPABLE, 0); }

}  // namespace penstock
