// SPDX-License-Identifier: Apache-2.0
#include "shm/slab_pool.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../base/child_process.h"

namespace penstock::shm {
namespace {

constexpr uint64_t kMegabyte = 1 << 20;

// A worker's pool, and the trainer's part played in the same process.
class SlabPoolTest : public testing::Test {
 protected:
  void open(const SlabPoolOptions& options) { pool_.emplace(options, is_closing_); }
  SlabRegion acquire(uint64_t bytes = 0) {
    auto region = pool_->acquire(bytes);
    EXPECT_TRUE(region) << region.error().message;
    return std::move(region).value();
  }
  // For a thread that plays the trainer: the arena's generation is the worker's, and a trainer has it from the
  // descriptor.
  auto release_of(const SlabRegion& region) {
    return [view = view_of(region.arena), slab = region.slab_index,
            generation = region.arena->generation(region.slab_index)] { view->release(slab, generation); };
  }
  void release(const SlabRegion& region) { release_of(region)(); }
  std::shared_ptr<ArenaView> view_of(const std::shared_ptr<Arena>& arena) {
    auto& view = views_[arena->id()];
    if (!view) view = ArenaView::map(FileDescriptor(::dup(arena->fd()))).value();
    return view;
  }

  std::atomic<bool> is_closing_{false};
  std::map<uint32_t, std::shared_ptr<ArenaView>> views_;
  std::optional<SlabPool> pool_;
};

TEST_F(SlabPoolTest, TheFirstArenaHasTwoSlabsMoreThanAreAskedForAhead) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2});
  const auto region = acquire();
  EXPECT_EQ(region.arena->slab_count(), 4u);
  EXPECT_EQ(region.capacity(), 2 * kMegabyte);
  EXPECT_FALSE(region.is_transient);
}

TEST_F(SlabPoolTest, TheMostSlabsAnArenaMayHaveBoundThePrefetchFactor) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 5000});
  EXPECT_EQ(acquire().arena->slab_count(), kSlabCountMax);
}

TEST_F(SlabPoolTest, ABatchThatDoesNotFitMakesTheArenaAgainWithFewerLargerSlabs) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2});
  const auto small = acquire();
  const auto large = acquire(3 * kMegabyte);
  EXPECT_NE(large.arena, small.arena);
  EXPECT_EQ(large.arena->slab_count(), 2u);
  EXPECT_GE(large.capacity(), 3 * kMegabyte);
  EXPECT_EQ(acquire().arena, large.arena) << "small batches use the large slabs from then on";
}

TEST_F(SlabPoolTest, ABatchAboveHalfTheCapGetsAnArenaOfItsOwnAndTheLastingOneStays) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2});
  const auto lasting = acquire();
  const auto large = acquire(5 * kMegabyte);
  EXPECT_TRUE(large.is_transient);
  EXPECT_EQ(large.arena->slab_count(), 1u);
  EXPECT_EQ(acquire().arena, lasting.arena);
}

TEST_F(SlabPoolTest, EveryArenaHasAnotherIdAndIsAnnouncedOnce) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2});
  std::set<uint32_t> ids;
  for (const uint64_t bytes : {uint64_t{0}, 3 * kMegabyte, 5 * kMegabyte, 6 * kMegabyte}) {
    const auto region = acquire(bytes);
    EXPECT_TRUE(ids.insert(region.arena->id()).second);
    EXPECT_TRUE(pool_->take_unannounced(region));
    if (!region.is_transient) {
      EXPECT_FALSE(pool_->take_unannounced(region));
    }
  }
}

TEST_F(SlabPoolTest, ATransientArenaBetweenDoesNotAnnounceTheLastingOneAgain) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2});
  EXPECT_TRUE(pool_->take_unannounced(acquire()));
  EXPECT_TRUE(pool_->take_unannounced(acquire(5 * kMegabyte)));
  EXPECT_FALSE(pool_->take_unannounced(acquire()));
}

TEST_F(SlabPoolTest, AFullArenaWaitsForTheTrainer) {
  open({.arena_bytes = 4 * kMegabyte, .prefetch_factor = 1});
  std::vector<SlabRegion> regions;
  for (int slab = 0; slab < 3; ++slab) regions.push_back(acquire());
  const std::jthread trainer(release_of(regions[1]));
  const auto region = acquire();
  EXPECT_EQ(region.arena, regions[1].arena);
  EXPECT_EQ(region.slab_index, regions[1].slab_index);
}

TEST_F(SlabPoolTest, TheLastSlabIsNotBegunWhereAnotherComesBackSoon) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2, .last_slab_wait = std::chrono::minutes(5)});
  std::vector<SlabRegion> held;
  for (int count = 0; count < 3; ++count) held.push_back(acquire(kMegabyte));
  std::thread trainer(release_of(held[1]));
  EXPECT_EQ(acquire(kMegabyte).slab_index, 1u);
  trainer.join();
  EXPECT_EQ(held[0].arena->total_backed_bytes(), 3 * kMegabyte);
}

TEST_F(SlabPoolTest, TheLastSlabIsBegunForALoopThatKeepsABatchAndNotWaitedForAgain) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2, .last_slab_wait = std::chrono::milliseconds(1)});
  for (int count = 0; count < 3; ++count) acquire(kMegabyte);
  EXPECT_EQ(pool_->acquire_if_free(kMegabyte), std::nullopt);
  const auto last = acquire(kMegabyte);
  EXPECT_EQ(last.slab_index, 3u);
  release(last);
  EXPECT_EQ(pool_->acquire_if_free(kMegabyte).value().slab_index, 3u);
}

TEST_F(SlabPoolTest, ASlabIsHadIfFreeOnlyWhereItFitsTheArena) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2});
  EXPECT_EQ(pool_->acquire_if_free(5 * kMegabyte), std::nullopt) << "it would be an arena of its own";
  const auto first = pool_->acquire_if_free(kMegabyte);
  ASSERT_TRUE(first);
  EXPECT_EQ(pool_->acquire_if_free(3 * kMegabyte), std::nullopt) << "the arena would be made again";
  pool_->renew();
  EXPECT_EQ(pool_->acquire_if_free(kMegabyte), std::nullopt);
  EXPECT_NE(acquire(kMegabyte).arena->id(), first->arena->id());
}

TEST_F(SlabPoolTest, ASlabThatAnotherThreadCancelsEndsTheWait) {
  open({.arena_bytes = 4 * kMegabyte, .prefetch_factor = 1});
  std::vector<SlabRegion> regions;
  for (int slab = 0; slab < 3; ++slab) regions.push_back(acquire());
  const std::jthread sender([&] { regions[2].arena->cancel(regions[2].slab_index); });
  EXPECT_EQ(acquire().slab_index, regions[2].slab_index);
}

TEST_F(SlabPoolTest, ATrainerThatGoesAwayEndsTheWait) {
  open({.arena_bytes = 4 * kMegabyte, .prefetch_factor = 1});
  for (int slab = 0; slab < 3; ++slab) acquire();
  const std::jthread watchdog([&] { is_closing_.store(true); });
  EXPECT_EQ(pool_->acquire(0).error().code, Errc::kClosed);
}

TEST_F(SlabPoolTest, AcquireNowTakesAFreeSlabAndOtherwiseAnArenaOfItsOwn) {
  open({.arena_bytes = 4 * kMegabyte, .prefetch_factor = 1});
  const auto first = acquire();
  EXPECT_EQ(pool_->acquire_now(kMegabyte).value().arena, first.arena);
  acquire();
  const auto beyond = pool_->acquire_now(kMegabyte).value();
  EXPECT_TRUE(beyond.is_transient);
  EXPECT_GE(beyond.capacity(), kMegabyte);
}

TEST_F(SlabPoolTest, AnArenaOfWhichHalfIsRetiredIsReplacedInsteadOfWaitedFor) {
  open({.arena_bytes = 4 * kMegabyte, .prefetch_factor = 2});
  const auto first = acquire();
  const auto view = view_of(first.arena);
  for (int slab = 0; slab < 3; ++slab) acquire();
  view->set_held(0, true);
  view->set_held(1, true);
  view->retire_held();
  EXPECT_NE(acquire().arena, first.arena);
}

TEST_F(SlabPoolTest, SlabsThatTheWorkerItselfKeepsAreNotWaitedForWhenTheUserMayHoldTheOthers) {
  for (uint32_t prefetch_factor = 1; prefetch_factor <= 3; ++prefetch_factor) {
    open({.arena_bytes = 4 * kMegabyte, .prefetch_factor = prefetch_factor});
    std::vector<SlabRegion> regions;
    for (uint32_t slab = 0; slab < prefetch_factor + 2; ++slab) regions.push_back(acquire());
    // The user holds the two that it may, and the dataset keeps tensors on all others.
    for (size_t slab = 2; slab < regions.size(); ++slab) {
      regions[slab].arena->pin(regions[slab].slab_index);
      release(regions[slab]);
    }
    EXPECT_NE(acquire().arena, regions[0].arena) << "prefetch_factor " << prefetch_factor;
    for (size_t slab = 2; slab < regions.size(); ++slab) regions[slab].arena->unpin(regions[slab].slab_index);
    views_.clear();
  }
}

TEST_F(SlabPoolTest, ATransientArenaIsGoneWithItsLastRegion) {
  open({.arena_bytes = 2 * kMegabyte, .prefetch_factor = 2});
  std::weak_ptr<Arena> arena;
  {
    const auto region = acquire(5 * kMegabyte);
    arena = region.arena;
  }
  EXPECT_TRUE(arena.expired());
}

TEST_F(SlabPoolTest, WithoutMemoryEveryWayToASlabIsNoMemoryAndAFreeSlabIsNotLost) {
  open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2});
  acquire();
  EXPECT_EQ(test::in_child([&]() -> std::string {
              if (!test::fail_fallocate(ENOSPC)) return "no seccomp filter";
              for (const uint64_t bytes : {kMegabyte, 3 * kMegabyte, 5 * kMegabyte}) {
                for (int again = 0; again < 10; ++again) {
                  const auto region = pool_->acquire(bytes);
                  if (region) return "a slab was had without memory";
                  if (region.error().code != Errc::kNoMemory) return region.error().message;
                  const auto now = pool_->acquire_now(bytes);
                  if (now || now.error().code != Errc::kNoMemory) return "acquire_now";
                }
              }
              return pool_->acquire(0) ? "" : "a slab that needs no memory cannot be had any more";
            }),
            "");
}

}  // namespace
}  // namespace penstock::shm
