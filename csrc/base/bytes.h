// SPDX-License-Identifier: Apache-2.0
#pragma once
// Little-endian reading and writing of byte formats. A reader never reads past its span: the first short read makes it
// fail permanently, so a parser may read a whole record and check ok() once. The formats match the memory layout of
// x86-64 and aarch64, so values are copied without conversion.

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace penstock {

static_assert(std::endian::native == std::endian::little, "penstock's formats are little-endian memory images");

template <typename T>
concept PlainNumber = std::is_arithmetic_v<T> || std::is_enum_v<T>;

// Thread-compatible.
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

// Thread-compatible.
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

}  // namespace penstock
