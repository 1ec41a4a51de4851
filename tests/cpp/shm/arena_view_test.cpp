// SPDX-License-Identifier: Apache-2.0
// The arenas that the trainer accepts, and its view of one that another process made.
#include <fcntl.h>
#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "../base/child_process.h"
#include "arena_fixture.h"
#include "shm/arena.h"
#include "shm/channel.h"

namespace penstock::shm {
namespace {

using std::chrono::minutes;
using std::chrono::steady_clock;

class ArenaViewTest : public ArenaTest {
 protected:
  // A control page of one page and `slab_count` slabs of one page each.
  static ControlPage page_of(uint32_t slab_count) {
    return {.slab_count = slab_count, .slab_bytes = page_bytes(), .control_bytes = page_bytes()};
  }
  static uint64_t file_bytes_of(const ControlPage& page) {
    return page.control_bytes + page.slab_count * page.slab_bytes;
  }
  static bool is_accepted(const FileDescriptor& fd) { return static_cast<bool>(ArenaView::map(fd)); }
  static Errc refusal(const FileDescriptor& fd) { return ArenaView::map(fd).error().code; }
  static bool is_present(const std::byte* address) {
    FileDescriptor pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    uint64_t entry = 0;
    const auto page_index = reinterpret_cast<uintptr_t>(address) / page_bytes();
    EXPECT_EQ(::pread(pagemap.get(), &entry, sizeof entry, static_cast<off_t>(page_index * sizeof entry)), 8);
    return entry >> 63 != 0;
  }
  // Minor faults of this process so far.
  static int64_t fault_count() {
    rusage usage{};
    EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_minflt;
  }
};

TEST_F(ArenaViewTest, AnArenaMadeByTheProtocolsWordsIsAccepted) {
  const auto page = page_of(2);
  EXPECT_TRUE(is_accepted(make_memfd(page, file_bytes_of(page))));
}

TEST_F(ArenaViewTest, AMemfdThatCouldStillShrinkOrGrowIsMalformed) {
  const auto page = page_of(2);
  for (const int seals : {0, F_SEAL_GROW | F_SEAL_SEAL, F_SEAL_SHRINK | F_SEAL_SEAL, F_SEAL_SHRINK | F_SEAL_GROW}) {
    EXPECT_EQ(refusal(make_memfd(page, file_bytes_of(page), seals)), Errc::kMalformed) << seals;
  }
}

TEST_F(ArenaViewTest, AFileThatItsSlabsDoNotFillIsMalformed) {
  const auto page = page_of(2);
  for (const int64_t difference : {-1, 1, -4096, 4096}) {
    const auto file_bytes = static_cast<uint64_t>(static_cast<int64_t>(file_bytes_of(page)) + difference);
    EXPECT_EQ(refusal(make_memfd(page, file_bytes)), Errc::kMalformed) << difference;
  }
}

TEST_F(ArenaViewTest, AFileShorterThanAControlPageOrLongerThanTheCapIsMalformed) {
  const auto page = page_of(2);
  for (const uint64_t file_bytes : {uint64_t{0}, uint64_t{63}, kArenaBytesMax + 1}) {
    EXPECT_EQ(refusal(make_memfd(page, file_bytes)), Errc::kMalformed) << file_bytes;
  }
}

TEST_F(ArenaViewTest, AnotherMagicIsMalformed) {
  auto page = page_of(2);
  page.magic ^= 1;
  EXPECT_EQ(refusal(make_memfd(page, file_bytes_of(page))), Errc::kMalformed);
}

TEST_F(ArenaViewTest, SlabCountsOutsideTheLimitsAreMalformed) {
  const auto page = page_of(2);
  for (const uint32_t slab_count : {0u, kSlabCountMax + 1, 0xffffffffu, 0x80000000u}) {
    auto hostile = page;
    hostile.slab_count = slab_count;
    EXPECT_EQ(refusal(make_memfd(hostile, file_bytes_of(page))), Errc::kMalformed) << slab_count;
  }
}

TEST_F(ArenaViewTest, SlabBytesWhoseProductWrapsAreMalformed) {
  const auto page = page_of(2);
  for (const uint64_t slab_bytes : {uint64_t{1} << 63, (uint64_t{1} << 63) + page_bytes(), ~uint64_t{0}, uint64_t{0}}) {
    auto hostile = page;
    hostile.slab_bytes = slab_bytes;
    EXPECT_EQ(refusal(make_memfd(hostile, file_bytes_of(page))), Errc::kMalformed) << slab_bytes;
  }
}

TEST_F(ArenaViewTest, ControlBytesThatDoNotHoldTheSlabsControlsAreMalformed) {
  auto page = page_of(1024);
  EXPECT_EQ(refusal(make_memfd(page, file_bytes_of(page))), Errc::kMalformed) << "1024 controls need 17 pages";
  page.control_bytes = 17 * page_bytes();
  EXPECT_TRUE(is_accepted(make_memfd(page, file_bytes_of(page))));
  const uint64_t file_bytes = file_bytes_of(page);
  for (const uint64_t control_bytes : {uint64_t{0}, ~uint64_t{0}, file_bytes + page_bytes()}) {
    page.control_bytes = control_bytes;
    EXPECT_EQ(refusal(make_memfd(page, file_bytes)), Errc::kMalformed) << control_bytes;
  }
}

TEST_F(ArenaViewTest, SlabsThatAreNotWholePagesAreMalformed) {
  ControlPage page{.slab_count = 2, .slab_bytes = page_bytes() / 2 + 1, .control_bytes = page_bytes()};
  EXPECT_EQ(refusal(make_memfd(page, file_bytes_of(page))), Errc::kMalformed);
  page = {.slab_count = 2, .slab_bytes = page_bytes(), .control_bytes = page_bytes() + 1};
  EXPECT_EQ(refusal(make_memfd(page, file_bytes_of(page))), Errc::kMalformed);
}

TEST_F(ArenaViewTest, EveryBitFlipOfTheControlPageIsRefusedOrKeepsEverySlabInside) {
  const auto page = page_of(4);
  const uint64_t file_bytes = file_bytes_of(page);
  for (size_t bit = 0; bit < sizeof page * 8; ++bit) {
    auto hostile = page;
    reinterpret_cast<unsigned char*>(&hostile)[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    if (const auto view = ArenaView::map(make_memfd(hostile, file_bytes))) {
      const auto& arena = *view.value();
      const auto span = arena.slab(arena.slab_count() - 1) - arena.slab(0);
      EXPECT_LE(static_cast<uint64_t>(span) + arena.slab_bytes(), file_bytes) << "bit " << bit;
    }
  }
}

TEST_F(ArenaViewTest, WhatIsNotAMemfdIsMalformed) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const FileDescriptor reading(ends[0]);
  const FileDescriptor writing(ends[1]);
  EXPECT_EQ(refusal(reading), Errc::kMalformed);
  EXPECT_EQ(refusal(FileDescriptor(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC))), Errc::kMalformed);
  EXPECT_EQ(refusal(FileDescriptor()), Errc::kMalformed);
}

TEST_F(ArenaViewTest, WhatTheWorkerWritesAfterTheMappingDoesNotMoveTheSlabs) {
  open({.slab_bytes = page_bytes(), .slab_count = 2});
  const std::byte* second = view_->slab(1);
  const ControlPage hostile{.slab_count = 0xffffffff, .slab_bytes = uint64_t{1} << 50, .control_bytes = 0};
  ASSERT_EQ(::pwrite(arena_->fd(), &hostile, sizeof hostile, 0), static_cast<ssize_t>(sizeof hostile));
  EXPECT_EQ(view_->slab(1), second);
  EXPECT_EQ(view_->slab_count(), 2u);
}

TEST_F(ArenaViewTest, PopulateFaultsPagesInAsFarAsAsked) {
  open({.slab_bytes = 8 * page_bytes(), .slab_count = 2});
  ASSERT_TRUE(arena_->reserve(1, 6 * page_bytes()));
  EXPECT_FALSE(is_present(view_->slab(1)));
  view_->populate(1, 4 * page_bytes());
  EXPECT_TRUE(is_present(view_->slab(1)));
  EXPECT_TRUE(is_present(view_->slab(1) + 3 * page_bytes()));
  view_->populate(1, 6 * page_bytes());
  EXPECT_TRUE(is_present(view_->slab(1) + 5 * page_bytes()));
  EXPECT_FALSE(is_present(view_->slab(0))) << "the other slab was touched";
}

TEST_F(ArenaViewTest, PopulatedPagesTakeOneFaultForManyAndNoneWhenTheTrainerWrites) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer has pages of its own for each page that is written";
#endif
  constexpr uint64_t kPageCount = 1024;
  open({.slab_bytes = kPageCount * page_bytes(), .slab_count = 1});
  ASSERT_TRUE(arena_->reserve(0, kPageCount * page_bytes()));
  const int64_t before = fault_count();
  view_->populate(0, kPageCount * page_bytes());
  const int64_t populated = fault_count();
  EXPECT_LT(populated - before, static_cast<int64_t>(kPageCount / 2));
  for (uint64_t page = 0; page < kPageCount; ++page) view_->slab(0)[page * page_bytes()] = std::byte{1};
  EXPECT_LT(fault_count() - populated, 10);
}

TEST_F(ArenaViewTest, PopulatingBeyondTheSlabDoesNothing) {
  open({.slab_bytes = page_bytes(), .slab_count = 2});
  ASSERT_TRUE(arena_->reserve(1, page_bytes()));
  view_->populate(0, 2 * page_bytes());
  EXPECT_FALSE(is_present(view_->slab(1)));
}

TEST_F(ArenaViewTest, TheTrainerSeesWhatAWorkerProcessWroteAndTheWorkerSeesTheRelease) {
  auto ends = Channel::open_pair().value();
  Channel trainer(std::move(ends.here));
  constexpr uint32_t kRoundCount = 50;
  test::ChildProcess worker([&]() -> std::string {
    Channel channel(std::move(ends.there));
    const auto say = [&](uint32_t number, std::span<const int> fds = {}) {
      return static_cast<bool>(channel.send_record(number, fds));
    };
    const auto arena = Arena::create({.slab_bytes = 1 << 20, .slab_count = 1}, 3).value();
    const int fd = arena->fd();
    if (!say(0, {&fd, 1})) return "the arena could not be passed";
    for (uint32_t round = 1; round <= kRoundCount; ++round) {
      auto slab_index = arena->try_acquire();
      while (!slab_index) {
        arena->wait_for_release(minutes(1));
        slab_index = arena->try_acquire();
      }
      if (!arena->reserve(0, arena->slab_bytes())) return "no memory";
      std::memset(arena->slab(0), static_cast<int>(round), arena->slab_bytes());
      if (!say(round)) return "the trainer has ended";
    }
    return "";
  });
  ends.there.reset();
  const auto deadline = steady_clock::now() + minutes(1);
  const auto passed = trainer.receive(deadline);
  ASSERT_TRUE(passed) << passed.error().message;
  ASSERT_EQ(passed.value().fds.size(), 1u);
  const auto view = ArenaView::map(passed.value().fds.front());
  ASSERT_TRUE(view) << view.error().message;
  for (uint32_t round = 1; round <= kRoundCount; ++round) {
    const auto received = trainer.receive(deadline);
    ASSERT_TRUE(received) << received.error().message;
    ASSERT_EQ(received.value().as<uint32_t>(), round);
    EXPECT_EQ(view.value()->slab(0)[0], std::byte(round));
    EXPECT_EQ(view.value()->slab(0)[(1 << 20) - 1], std::byte(round));
    view.value()->release(0, round);
  }
  EXPECT_EQ(worker.join(), "");
}

}  // namespace
}  // namespace penstock::shm
