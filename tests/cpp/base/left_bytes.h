// SPDX-License-Identifier: Apache-2.0
#pragma once
// What values with secrets have in their own memory, and what they leave there.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace penstock::test {

// Read as volatile, as the compiler knows that nobody may read a value that was destroyed.
inline bool has_bytes(const void* memory, size_t size, std::span<const std::byte> bytes) {
  const auto* const view = static_cast<const volatile std::byte*>(memory);
  std::vector<std::byte> copy(size);
  for (size_t place = 0; place < size; ++place) copy[place] = view[place];
  return std::search(copy.begin(), copy.end(), bytes.begin(), bytes.end()) != copy.end();
}

template <typename Value>
bool holds(const Value& value, std::span<const std::byte> bytes) {
  return has_bytes(std::addressof(value), sizeof value, bytes);
}

// Whether the bytes stay where a value, made of these arguments, was destroyed.
template <typename Value, typename... Arguments>
bool leaves(std::span<const std::byte> bytes, Arguments&&... arguments) {
  alignas(Value) std::array<std::byte, sizeof(Value)> memory{};
  auto* const value = std::construct_at(reinterpret_cast<Value*>(memory.data()), std::forward<Arguments>(arguments)...);
  EXPECT_TRUE(holds(*value, bytes)) << "the value has never held them";
  std::destroy_at(value);
  return has_bytes(memory.data(), memory.size(), bytes);
}

}  // namespace penstock::test
