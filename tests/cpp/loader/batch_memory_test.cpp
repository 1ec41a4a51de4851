// SPDX-License-Identifier: Apache-2.0
#include "loader/batch_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include "../base/child_process.h"
#include "loader/incoming_batch.h"

namespace penstock::loader {
namespace {

constexpr uint64_t kBytes = 48 << 20;
constexpr uint64_t kPiece = 1 << 20;

// Memory for a batch of gigabytes was found for as long as a lease lasts, by the thread that answers leases.
TEST(BatchMemory, SlabThatGrowsHasMemoryAsFarAsItIsFilled) {
  BatchMemory memory(1 << 30);
  auto slab = memory.take_growing(kBytes).value();
  EXPECT_EQ(slab.backed_bytes, 0u);
  EXPECT_GE(slab.lease->view().slab_bytes(), kBytes);
  for (uint64_t bytes = kPiece; bytes <= 3 * kPiece; bytes += kPiece) {
    ASSERT_TRUE(BatchMemory::grow(slab, bytes));
    EXPECT_EQ(slab.backed_bytes, bytes);
    slab.lease->data()[bytes - 1] = std::byte{1};
  }
  slab = {};
  // What it had is there for the next batch in this place.
  EXPECT_EQ(memory.take_growing(kBytes).value().backed_bytes, 3 * kPiece);
}

TEST(BatchMemory, SizeThatIsUnlikelyCostsAddressesAloneAndLeavesTheOtherSlabsAsTheyAre) {
  BatchMemory memory(1 << 30);
  const auto usual = memory.take(kPiece).value();
  constexpr uint64_t kClaimed = uint64_t{1} << 34;
  const auto claimed = memory.take_growing(kClaimed).value();
  EXPECT_EQ(claimed.backed_bytes, 0u);
  EXPECT_TRUE(claimed.is_transient);
  EXPECT_EQ(memory.take(kClaimed).error().code, Errc::kTooLarge);
  EXPECT_EQ(&memory.take(kPiece).value().lease->view(), &usual.lease->view());
}

// A size that a worker claimed counted as one that had come, and raised the cap for all workers from then on.
TEST(BatchMemory, SizesUpToFourTimesTheLargestThatCameAreLikelyWhateverWasClaimed) {
  BatchMemory memory(1 << 30);
  constexpr uint64_t kClaimed = 96 << 20;
  const auto is_likely = [&](uint64_t bytes) { return !memory.take_growing(bytes).value().is_transient; };
  for (int count = 0; count < 3; ++count) EXPECT_FALSE(is_likely(kClaimed));
  EXPECT_EQ(memory.take(kClaimed).error().code, Errc::kTooLarge);
  EXPECT_EQ(memory.largest_bytes(), 0u);
  memory.note_received(kClaimed / 4);
  memory.note_received(1);
  EXPECT_EQ(memory.largest_bytes(), kClaimed / 4);
  EXPECT_TRUE(is_likely(kClaimed));
  EXPECT_FALSE(is_likely(kClaimed + 4));
  EXPECT_EQ(memory.take(kClaimed + 4).error().code, Errc::kTooLarge);
}

TEST(BatchMemory, BatchForWhichMemoryRunsOutGoesOnOnTheHeap) {
  EXPECT_EQ(test::in_child([]() -> std::string {
              BatchMemory memory(1 << 30);
              IncomingBatch batch(memory, 3 * kPiece);
              const auto first = batch.room_for(0, kPiece);
              if (first.size() != kPiece) return "there is no room";
              std::fill(first.begin(), first.end(), std::byte{7});
              batch.add(kPiece);
              if (!test::fail_fallocate(ENOSPC)) return "memory cannot be made to run out";
              const auto second = batch.room_for(kPiece, kPiece);
              if (second.size() != kPiece) return "there is no room on the heap";
              const std::byte* const begin = second.data() - kPiece;
              return std::all_of(begin, begin + kPiece, [](std::byte byte) { return byte == std::byte{7}; })
                         ? ""
                         : "what came before is not there";
            }),
            "");
}

}  // namespace
}  // namespace penstock::loader
