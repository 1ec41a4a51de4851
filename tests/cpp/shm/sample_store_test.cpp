// SPDX-License-Identifier: Apache-2.0
#include "shm/sample_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace penstock::shm {
namespace {

constexpr uint64_t kBytes = 192;  // of a sample

std::shared_ptr<SampleStore> store_of(uint64_t sample_count, uint64_t budget_bytes) {
  return SampleStore::create({.sample_count = sample_count, .budget_bytes = budget_bytes}).value();
}

bool put(SampleStore& store, uint64_t index, uint64_t bytes = kBytes) {
  auto claim = store.claim(index, bytes);
  if (!claim) return false;
  std::ranges::fill(claim->memory(), static_cast<std::byte>(index));
  claim->publish();
  return true;
}

bool has(const SampleStore& store, uint64_t index, uint64_t bytes = kBytes) {
  const auto found = store.find(index);
  if (!found) return false;
  EXPECT_EQ(found->bytes.size(), bytes);
  return std::ranges::all_of(found->bytes, [&](std::byte byte) { return byte == static_cast<std::byte>(index); });
}

// Runs `work` in a child process, which is then killed.
void in_killed_process(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    work();
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(SampleStore, StoresWhatTheBudgetHolds) {
  const auto store = store_of(10, 4 * kBytes);
  for (uint64_t index = 0; index < 10; ++index) EXPECT_EQ(put(*store, index), index < 4) << index;
  for (uint64_t index = 0; index < 10; ++index) EXPECT_EQ(has(*store, index), index < 4) << index;
  EXPECT_FALSE(store->has_room(4));
  EXPECT_EQ(store->contents().sample_count, 4U);
  EXPECT_EQ(store->contents().bytes, 4 * kBytes);
  EXPECT_FALSE(put(*store, 0)) << "it is stored already";
}

TEST(SampleStore, ASmallerSampleStillFits) {
  const auto store = store_of(3, 3 * kBytes);
  EXPECT_TRUE(put(*store, 0, 2 * kBytes));
  EXPECT_FALSE(put(*store, 1, 2 * kBytes));
  EXPECT_FALSE(store->has_room(1)) << "as far as is known";
  EXPECT_TRUE(put(*store, 2));
  EXPECT_TRUE(has(*store, 2));
}

TEST(SampleStore, OnlyTheChosenSamplesAreStored) {
  const auto store = store_of(8, 8 * kBytes);
  EXPECT_TRUE(put(*store, 0)) << "before any were chosen";
  store->keep_only(2, 4);
  for (uint64_t index = 1; index < 8; ++index) {
    EXPECT_EQ(store->has_room(index), index == 2 || index == 3);
    EXPECT_EQ(put(*store, index), index == 2 || index == 3);
  }
  EXPECT_TRUE(has(*store, 0)) << "what is stored stays";
  store->keep_only(4, 8);
  EXPECT_TRUE(put(*store, 7));
}

TEST(SampleStore, ChoiceThatFewSamplesMeetIsTakenBack) {
  const auto missed = [](SampleStore& store, uint64_t kept, uint64_t others) {
    for (uint64_t count = 0; count < kept; ++count) store.note_missed(0);
    for (uint64_t count = 0; count < others; ++count) store.note_missed(3);
  };
  for (const bool is_right : {true, false}) {
    const auto store = store_of(4, 4 * kBytes);
    store->keep_only(0, 2);
    missed(*store, is_right ? 110 : 90, is_right ? 145 : 165);
    EXPECT_FALSE(store->has_room(3)) << "too few to tell";
    missed(*store, 0, 1);
    EXPECT_EQ(store->has_room(3), !is_right);
    missed(*store, 0, 1000);
    EXPECT_EQ(store->has_room(3), !is_right) << "once all chosen samples are stored, others are missed";
  }
}

TEST(SampleStore, AClaimIsOfOneThread) {
  const auto store = store_of(2, 2 * kBytes);
  {
    const auto claim = store->claim(0, kBytes);
    ASSERT_TRUE(claim);
    EXPECT_FALSE(store->claim(0, kBytes)) << "a second one by the same thread";
    std::thread([&] { EXPECT_FALSE(store->claim(0, kBytes)); }).join();
    EXPECT_FALSE(store->find(0)) << "nothing was published";
  }
  EXPECT_FALSE(has(*store, 0));
  EXPECT_TRUE(put(*store, 0)) << "the claim was given back with its memory";
  EXPECT_TRUE(put(*store, 1));
}

TEST(SampleStore, AKilledWriterLeavesNothingAndTakesNothing) {
  const auto store = store_of(2, 2 * kBytes);
  for (int round = 0; round < 20; ++round) {
    in_killed_process([&] {
      auto claim = store->claim(0, kBytes);
      std::memset(claim->memory().data(), 0x55, kBytes / 2);
      ::raise(SIGKILL);
    });
    EXPECT_FALSE(store->find(0));
  }
  EXPECT_TRUE(put(*store, 0));
  EXPECT_TRUE(put(*store, 1)) << "20 killed writers have used the memory of one sample";
  EXPECT_TRUE(has(*store, 0) && has(*store, 1));
}

TEST(SampleStore, AKilledProcessKeepsWhatItPublished) {
  const auto store = store_of(2, 2 * kBytes);
  in_killed_process([&] { put(*store, 1); });
  EXPECT_TRUE(has(*store, 1));
}

TEST(SampleStore, WritersKilledAtRandomTimesLeaveNoTornSample) {
  const auto store = store_of(256, 256 * kBytes);
  for (uint32_t round = 0; round < 60; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (uint64_t index = round % 7;; ++index) put(*store, index % 256);
    }
    ::usleep(round * 10);
    ::kill(child, SIGKILL);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    for (uint64_t index = 0; index < 256; ++index) ASSERT_EQ(has(*store, index), store->find(index).has_value());
  }
  for (uint64_t index = 0; index < 256; ++index) ASSERT_EQ(put(*store, index), !has(*store, index)) << index;
  for (uint64_t index = 0; index < 256; ++index) ASSERT_TRUE(has(*store, index)) << index;
}

TEST(SampleStore, DamagedBytesAreDroppedAndStoredAgain) {
  const auto store = store_of(1, kBytes);
  ASSERT_TRUE(put(*store, 0));
  const auto found = store->find(0);
  store->drop(0, *found);
  EXPECT_FALSE(store->find(0));
  EXPECT_TRUE(store->has_room(0));
  EXPECT_TRUE(put(*store, 0)) << "in the same memory";
  store->drop(0, *found);
  EXPECT_TRUE(has(*store, 0)) << "it was stored again since";
  EXPECT_EQ(store->counted(StoreCount::kDamaged), 1U);
}

TEST(SampleStore, AnotherProcessMapsIt) {
  const auto store = store_of(2, 2 * kBytes);
  ASSERT_TRUE(put(*store, 0));
  const auto other = SampleStore::attach(FileDescriptor(::dup(store->fd())));
  ASSERT_TRUE(other);
  EXPECT_TRUE(has(*other.value(), 0));
  EXPECT_TRUE(put(*other.value(), 1));
  EXPECT_TRUE(has(*store, 1));
  EXPECT_EQ(other.value()->sample_count(), 2U);
  EXPECT_FALSE(SampleStore::attach(FileDescriptor(::open("/dev/null", O_RDWR))));
}

TEST(SampleStore, BarredSamplesAreNotStored) {
  const auto store = store_of(3, 3 * kBytes);
  store->bar(0);
  EXPECT_TRUE(store->is_barred(0));
  EXPECT_FALSE(put(*store, 0));
  EXPECT_TRUE(put(*store, 1));
  EXPECT_EQ(store->contents().barred_count, 1U);
  store->bar_all();
  EXPECT_FALSE(store->find(1)) << "also of those that are stored";
  EXPECT_FALSE(put(*store, 2));
}

TEST(SampleStore, ThreadsStoreEachSampleOnce) {
  const auto store = store_of(2000, 1000 * kBytes);
  std::atomic<uint64_t> stored = 0;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread)
      threads.emplace_back([&] {
        for (uint64_t index = 0; index < 2000; ++index) stored += put(*store, index);
      });
  }
  EXPECT_EQ(stored, 1000U);
  EXPECT_EQ(store->contents().sample_count, 1000U);
}

}  // namespace
}  // namespace penstock::shm
