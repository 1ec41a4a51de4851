// SPDX-License-Identifier: Apache-2.0
#include "base/wiped.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

namespace penstock {
namespace {

using Secret = WipedArray<32>;

TEST(WipedArray, LeavesNoByteWhereItWas) {
  alignas(Secret) std::array<std::byte, sizeof(Secret)> memory{};
  auto* const secret = std::construct_at(reinterpret_cast<Secret*>(memory.data()));
  secret->fill(std::byte{7});
  const Secret copy = *secret;
  std::destroy_at(secret);
  std::array<std::byte, sizeof(Secret)> left{};
  std::memcpy(left.data(), memory.data(), left.size());
  EXPECT_EQ(std::count(left.begin(), left.end(), std::byte{0}), 32);
  EXPECT_EQ(std::count(copy.begin(), copy.end(), std::byte{7}), 32);
}

}  // namespace
}  // namespace penstock
