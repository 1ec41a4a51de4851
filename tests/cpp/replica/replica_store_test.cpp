// SPDX-License-Identifier: Apache-2.0
#include "replica/replica_store.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/live_clock.h"

namespace penstock::replica {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kRoom = 1 << 20;

RequestDigest request(uint64_t sequence, uint64_t content = 0) {
  ContentDigest digest;
  digest.add(sequence);
  digest.add(content);
  return {.sequence = sequence, .value = digest.value()};
}

std::shared_ptr<const ReplicaAnswer> batch(int64_t value, int64_t bytes = 64) {
  auto answer = std::make_shared<ReplicaAnswer>();
  answer->tensors.push_back(at::full({bytes}, value, at::kByte));
  return answer;
}

int64_t value_of(const ReplicaStore::Taken& taken) {
  return taken.answer ? taken.answer->tensors[0][0].item<int64_t>() : -1;
}

class ReplicaStoreTest : public testing::Test {
 protected:
  ReplicaStore::Taken take(size_t follower, const RequestDigest& wanted, milliseconds wait = milliseconds(0)) {
    return store_.take(follower, wanted, clock_now(), std::chrono::steady_clock::now() + wait);
  }
  // As if the follower had asked so long ago.
  ReplicaStore::Taken take_late(size_t follower, const RequestDigest& wanted) {
    return store_.take(follower, wanted, clock_now() - 2 * kPatience, std::chrono::steady_clock::now());
  }

  ReplicaStore store_{2, kRoom};
};

TEST_F(ReplicaStoreTest, EveryFollowerTakesABatchInWhateverOrder) {
  for (uint64_t sequence = 0; sequence < 3; ++sequence) store_.asked(1, request(sequence));
  store_.arrived(1, 2, batch(12));
  EXPECT_EQ(value_of(take(0, request(0))), -1);
  EXPECT_EQ(value_of(take(0, request(2))), 12);
  store_.arrived(1, 0, batch(10));
  EXPECT_EQ(value_of(take(0, request(0))), 10);
  EXPECT_EQ(value_of(take(1, request(0))), 10);
  EXPECT_EQ(value_of(take(1, request(2))), 12);
}

TEST_F(ReplicaStoreTest, AFollowerMayAskBeforeItsLeader) {
  std::thread leader([this] {
    std::this_thread::sleep_for(milliseconds(20));
    store_.asked(1, request(0));
    store_.arrived(1, 0, batch(10));
  });
  EXPECT_EQ(value_of(take(0, request(0), std::chrono::seconds(20))), 10);
  leader.join();
}

TEST_F(ReplicaStoreTest, EpochsAreToldApartByWhatTheirBatchesAreMadeFrom) {
  store_.asked(1, request(0, 100));
  store_.arrived(1, 0, batch(1));
  store_.asked(2, request(0, 200));
  store_.arrived(2, 0, batch(2));
  EXPECT_EQ(value_of(take(0, request(0, 200))), 2);
  EXPECT_EQ(value_of(take(1, request(0, 100))), 1);
  EXPECT_EQ(value_of(take(1, request(0, 200))), 2);
}

TEST_F(ReplicaStoreTest, WhatAFollowerPassesByTakesNoRoom) {
  for (uint32_t epoch = 1; epoch < 20; ++epoch) {
    store_.asked(epoch, request(0, epoch));
    store_.arrived(epoch, 0, batch(1, kRoom / 2));  // would block
    for (size_t follower : {0, 1}) {
      EXPECT_EQ(value_of(take(follower, request(1, epoch))), -1);  // waits for what has not come
    }
  }
}

TEST_F(ReplicaStoreTest, TheLeaderWaitsForAFollowerThatIsSlow) {
  for (uint64_t sequence = 0; sequence < 3; ++sequence) store_.asked(1, request(sequence));
  store_.arrived(1, 0, batch(10, kRoom));
  EXPECT_EQ(value_of(take(0, request(0))), 10);
  std::atomic<bool> has_arrived = false;
  std::thread chain([&] {
    store_.arrived(1, 1, batch(11, kRoom));
    has_arrived.store(true);
  });
  while (!store_.awaited_follower()) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(store_.awaited_follower()->first, 1u);
  EXPECT_FALSE(has_arrived.load());
  EXPECT_EQ(value_of(take(1, request(0))), 10);
  chain.join();
  EXPECT_FALSE(store_.awaited_follower());
}

TEST_F(ReplicaStoreTest, AFollowerThatWaitsForALaterArrivalIsNotSlow) {
  for (uint64_t sequence = 0; sequence < 3; ++sequence) store_.asked(1, request(sequence));
  store_.arrived(1, 1, batch(11, kRoom));
  for (size_t follower : {0, 1}) EXPECT_EQ(value_of(take(follower, request(0))), -1);
  store_.arrived(1, 0, batch(10, kRoom));
  EXPECT_EQ(value_of(take(1, request(0))), 10);
}

TEST_F(ReplicaStoreTest, NobodyWaitsForASlowFollowerOnceTheSourceHasStopped) {
  for (uint64_t sequence = 0; sequence < 2; ++sequence) store_.asked(1, request(sequence));
  store_.arrived(1, 0, batch(10, kRoom));
  std::thread chain([this] { store_.arrived(1, 1, batch(11, kRoom)); });
  while (!store_.awaited_follower()) std::this_thread::sleep_for(milliseconds(1));
  store_.stop();
  chain.join();
}

TEST_F(ReplicaStoreTest, AnotherOrderIsRefused) {
  store_.asked(1, request(0, 7));
  EXPECT_EQ(take(0, request(0, 8)).refusal, "") << "the leader may not have begun that epoch";
  EXPECT_NE(take_late(0, request(0, 8)).refusal.find("requested another batch"), std::string::npos);
}

TEST_F(ReplicaStoreTest, AnEpochThatTheLeaderHasLeftIsRefused) {
  store_.asked(1, request(5, 1));
  store_.asked(2, request(0, 2));
  EXPECT_EQ(take(0, request(5, 1)).refusal, "") << "it may be on its way";
  EXPECT_NE(take_late(0, request(5, 1)).refusal.find("started another epoch"), std::string::npos);
}

TEST_F(ReplicaStoreTest, AFollowerThatIsAheadIsNotRefused) {
  store_.asked(1, request(0, 1));
  EXPECT_EQ(take_late(0, request(3, 1)).refusal, "");
}

TEST_F(ReplicaStoreTest, AllFollowersHaveAllBatchesOfManyEpochs) {
  constexpr uint32_t kEpochs = 30;
  constexpr uint64_t kBatches = 20;
  const auto value = [](uint32_t epoch, uint64_t sequence) {
    return static_cast<int64_t>((epoch * 7 + sequence) % 200);
  };
  std::vector<std::thread> followers;
  for (size_t follower : {0, 1}) {
    followers.emplace_back([&, follower] {
      for (uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
        // The second leaves every third epoch in the middle.
        const uint64_t end = follower == 1 && epoch % 3 == 0 ? kBatches / 2 : kBatches;
        for (uint64_t sequence = 0; sequence < end; ++sequence)
          EXPECT_EQ(value_of(take(follower, request(sequence, epoch), std::chrono::seconds(60))),
                    value(epoch, sequence));
      }
    });
  }
  std::mt19937 random(5);
  for (uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
    std::vector<uint64_t> order(kBatches);
    for (uint64_t sequence = 0; sequence < kBatches; ++sequence) {
      store_.asked(epoch, request(sequence, epoch));
      order[sequence] = sequence;
    }
    std::shuffle(order.begin(), order.end(), random);
    for (const uint64_t sequence : order) store_.arrived(epoch, sequence, batch(value(epoch, sequence), kRoom / 4));
  }
  for (std::thread& follower : followers) follower.join();
}

}  // namespace
}  // namespace penstock::replica
