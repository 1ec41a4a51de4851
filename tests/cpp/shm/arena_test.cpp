// SPDX-License-Identifier: Apache-2.0
#include "shm/arena.h"

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "../base/child_process.h"
#include "arena_fixture.h"
#include "base/mutex.h"

namespace penstock::shm {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::steady_clock;

TEST_F(ArenaTest, SlabsAreRoundedUpToWholePagesAndLieApart) {
  open({.slab_bytes = page_bytes() + 1, .slab_count = 3});
  EXPECT_EQ(arena_->slab_bytes(), 2 * page_bytes());
  EXPECT_EQ(view_->slab_bytes(), 2 * page_bytes());
  EXPECT_EQ(view_->slab_count(), 3u);
  for (uint32_t index = 0; index < 3; ++index) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena_->slab(index)) % page_bytes(), 0u);
    EXPECT_EQ(arena_->slab(index) - arena_->slab(0), static_cast<ptrdiff_t>(index * arena_->slab_bytes()));
  }
}

TEST_F(ArenaTest, BothSidesSeeTheSameBytes) {
  open({.slab_bytes = 3 * page_bytes(), .slab_count = 2});
  for (uint32_t index = 0; index < 2; ++index) {
    ASSERT_TRUE(arena_->reserve(index, arena_->slab_bytes()));
    std::memset(arena_->slab(index), static_cast<int>(index + 1), arena_->slab_bytes());
  }
  for (uint32_t index = 0; index < 2; ++index) {
    EXPECT_EQ(view_->slab(index)[0], std::byte(index + 1));
    EXPECT_EQ(view_->slab(index)[view_->slab_bytes() - 1], std::byte(index + 1));
  }
}

TEST_F(ArenaTest, TheFreeSlabWithTheLowestIndexIsAcquiredFirst) {
  open({.slab_bytes = 1, .slab_count = 4});
  for (uint32_t expected = 0; expected < 4; ++expected) EXPECT_EQ(arena_->try_acquire(), expected);
  release(3);
  release(1);
  EXPECT_EQ(arena_->try_acquire(), 1u);
  EXPECT_EQ(arena_->try_acquire(), 3u);
  EXPECT_EQ(arena_->try_acquire(), std::nullopt);
}

TEST_F(ArenaTest, EveryAcquisitionHasANewGeneration) {
  open({.slab_bytes = 1, .slab_count = 1});
  for (uint32_t generation = 1; generation < 50; ++generation) {
    ASSERT_EQ(arena_->try_acquire(), 0u);
    EXPECT_EQ(arena_->generation(0), generation);
    release(0);
  }
}

TEST_F(ArenaTest, AReleaseOfAnEarlierGenerationFreesNothing) {
  open({.slab_bytes = 1, .slab_count = 1});
  ASSERT_EQ(acquire_all(), 1u);
  release(0);
  ASSERT_EQ(acquire_all(), 1u);
  view_->release(0, arena_->generation(0) - 1);
  EXPECT_EQ(arena_->try_acquire(), std::nullopt);
}

TEST_F(ArenaTest, ACancelledSlabIsFreeAgain) {
  open({.slab_bytes = 1, .slab_count = 1});
  ASSERT_EQ(arena_->try_acquire(), 0u);
  arena_->cancel(0);
  EXPECT_EQ(arena_->try_acquire(), 0u);
}

TEST_F(ArenaTest, APinHoldsAReleasedSlabBackUntilTheLastUnpin) {
  open({.slab_bytes = 1, .slab_count = 1});
  ASSERT_EQ(acquire_all(), 1u);
  arena_->pin(0);
  arena_->pin(0);
  release(0);
  EXPECT_EQ(arena_->try_acquire(), std::nullopt);
  arena_->unpin(0);
  EXPECT_EQ(arena_->try_acquire(), std::nullopt);
  arena_->unpin(0);
  EXPECT_EQ(arena_->try_acquire(), 0u);
}

TEST_F(ArenaTest, UnpinningWhatIsNotPinnedAsserts) {
  open({.slab_bytes = 1, .slab_count = 1});
  EXPECT_THROW(arena_->unpin(0), AssertionFailure);
}

TEST_F(ArenaTest, OnlyHeldSlabsAreRetiredAndNeverAcquiredAgain) {
  open({.slab_bytes = 1, .slab_count = 3});
  ASSERT_EQ(acquire_all(), 3u);
  view_->set_held(1, true);
  view_->retire_held();
  for (uint32_t index = 0; index < 3; ++index) release(index);
  EXPECT_EQ(view_->alive_count(), 2u);
  EXPECT_EQ(arena_->alive_count(), 2u);
  EXPECT_EQ(arena_->try_acquire(), 0u);
  EXPECT_EQ(arena_->try_acquire(), 2u);
  EXPECT_EQ(arena_->try_acquire(), std::nullopt);
}

TEST_F(ArenaTest, HeldSlabsAreCountedOnceAndGivenUpByTheRelease) {
  open({.slab_bytes = 1, .slab_count = 3});
  ASSERT_EQ(acquire_all(), 3u);
  view_->set_held(0, true);
  view_->set_held(0, true);
  view_->set_held(2, true);
  EXPECT_EQ(view_->held_count(), 2u);
  release(0);
  release(1);
  EXPECT_EQ(view_->held_count(), 1u);
}

TEST_F(ArenaTest, ReserveTakesOnlyTheMemoryThatIsNeeded) {
  open({.slab_bytes = 64 << 20, .slab_count = 4});
  const uint64_t control_bytes = file_memory_bytes();
  EXPECT_LE(control_bytes, 2 * page_bytes());
  ASSERT_TRUE(arena_->reserve(2, 3 * page_bytes() + 1));
  EXPECT_EQ(file_memory_bytes() - control_bytes, 4 * page_bytes());
  EXPECT_EQ(arena_->backed_bytes(2), 4 * page_bytes());
  ASSERT_TRUE(arena_->reserve(2, page_bytes()));
  EXPECT_EQ(file_memory_bytes() - control_bytes, 4 * page_bytes()) << "a smaller batch takes nothing";
  ASSERT_TRUE(arena_->reserve(2, 6 * page_bytes()));
  ASSERT_TRUE(arena_->reserve(0, 1));
  EXPECT_EQ(file_memory_bytes() - control_bytes, 7 * page_bytes());
  EXPECT_EQ(arena_->total_backed_bytes(), 7 * page_bytes());
}

TEST_F(ArenaTest, WaitingReturnsAtOnceWhenASlabIsFree) {
  open({.slab_bytes = 1, .slab_count = 2});
  ASSERT_EQ(arena_->try_acquire(), 0u);
  arena_->wait_for_release(hours(1));
}

TEST_F(ArenaTest, WaitingEndsAtItsTimeout) {
  open({.slab_bytes = 1, .slab_count = 1});
  ASSERT_EQ(acquire_all(), 1u);
  arena_->wait_for_release(milliseconds(5));
  EXPECT_EQ(arena_->try_acquire(), std::nullopt);
}

TEST_F(ArenaTest, AReleaseOnAnotherThreadWakesTheWorkerThatSleeps) {
  open({.slab_bytes = 1, .slab_count = 1});
  ASSERT_EQ(acquire_all(), 1u);
  void* base = ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, arena_->fd(), 0);
  ASSERT_NE(base, MAP_FAILED);
  const ArenaMapping mapping(static_cast<std::byte*>(base), page_bytes());
  const uint32_t generation = arena_->generation(0);  // the worker's own; a trainer has it from the descriptor
  const std::jthread trainer([&] {
    while (mapping.control().is_worker_waiting.load() == 0) std::this_thread::yield();
    view_->release(0, generation);
  });
  arena_->wait_for_release(hours(1));
  EXPECT_EQ(arena_->try_acquire(), 0u);
}

TEST_F(ArenaTest, NoWakeIsLostHoweverTheReleaseMeetsTheWait) {
  open({.slab_bytes = 1, .slab_count = 2});
  using Sent = std::pair<uint32_t, uint32_t>;  // a slab and its generation, as in a descriptor
  BoundedQueue<Sent> sent(2);
  std::jthread trainer([&] {
    while (const auto slab = sent.pop_until(steady_clock::now() + hours(1))) view_->release(slab->first, slab->second);
  });
  const auto begin = steady_clock::now();
  for (int round = 0; round < 20'000; ++round) {
    auto slab_index = arena_->try_acquire();
    while (!slab_index) {
      arena_->wait_for_release(minutes(5));
      slab_index = arena_->try_acquire();
    }
    sent.push({*slab_index, arena_->generation(*slab_index)});
  }
  sent.close();
  EXPECT_LT(steady_clock::now() - begin, minutes(2)) << "a wait ran into its timeout";
}

TEST_F(ArenaTest, MoreBytesThanTheCapAreTooLarge) {
  const auto arena = Arena::create({.slab_bytes = kArenaBytesMax / 2, .slab_count = 2}, 0);
  EXPECT_EQ(arena.error().code, Errc::kTooLarge);
  EXPECT_EQ(Arena::create({.slab_bytes = ~uint64_t{0} / 2, .slab_count = 4}, 0).error().code, Errc::kTooLarge);
}

TEST_F(ArenaTest, AnArenaThatTheFileSizeLimitForbidsIsNoMemory) {
  EXPECT_EQ(test::in_child([] {
              test::limit_file_size(1 << 20);
              const auto arena = Arena::create({.slab_bytes = 1 << 20, .slab_count = 4}, 0);
              if (arena) return std::string("an arena above the limit was made");
              return arena.error().code == Errc::kNoMemory ? "" : arena.error().message;
            }),
            "");
}

TEST_F(ArenaTest, ASlabThatCannotGrowIsNoMemoryAndWhatItHadStaysUsable) {
  open({.slab_bytes = 16 * page_bytes(), .slab_count = 1});
  EXPECT_EQ(test::in_child([&] {
              if (!arena_->reserve(0, page_bytes())) return std::string("the first page could not be had");
              if (!test::fail_fallocate(ENOSPC)) return std::string("no seccomp filter");
              const auto reserved = arena_->reserve(0, 2 * page_bytes());
              if (reserved) return std::string("memory was had where there is none");
              if (reserved.error().code != Errc::kNoMemory) return reserved.error().message;
              if (arena_->backed_bytes(0) != page_bytes()) return std::string("it claims memory that it did not get");
              std::memset(arena_->slab(0), 1, page_bytes());
              return std::string();
            }),
            "");
}

TEST_F(ArenaTest, AControlPageThatCannotBeHadIsNoMemory) {
  EXPECT_EQ(test::in_child([] {
              if (!test::fail_fallocate(ENOSPC)) return std::string("no seccomp filter");
              const auto arena = Arena::create({.slab_bytes = 1, .slab_count = 1}, 0);
              if (arena) return std::string("an arena was made without memory");
              return arena.error().code == Errc::kNoMemory ? "" : arena.error().message;
            }),
            "");
}

}  // namespace
}  // namespace penstock::shm
