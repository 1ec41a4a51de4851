// SPDX-License-Identifier: Apache-2.0
#include "dataset/copy_past_caches.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <vector>

namespace penstock::dataset {
namespace {

TEST(CopyPastCaches, CopiesEveryByteAndNoOtherAtEveryAlignmentAndLength) {
  constexpr std::byte kUntouched{0xA5};
  constexpr size_t kRoom = 64 + 300 + 64;
  std::mt19937 random(7);
  std::vector<std::byte> source(kRoom);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random() % 256);
  for (size_t to = 0; to < 64; ++to) {
    for (const size_t from : {0, 1, 15, 16, 33}) {
      for (size_t bytes = 0; bytes <= 300; bytes += bytes < 70 ? 1 : 23) {
        std::vector<std::byte> target(kRoom, kUntouched);
        copy_past_caches(target.data() + to, source.data() + from, bytes);
        for (size_t at = 0; at < kRoom; ++at) {
          const bool is_copied = at >= to && at < to + bytes;
          ASSERT_EQ(target[at], is_copied ? source[from + at - to] : kUntouched)
              << "byte " << at << " of " << bytes << " from " << from << " to " << to;
        }
      }
    }
  }
}

}  // namespace
}  // namespace penstock::dataset
