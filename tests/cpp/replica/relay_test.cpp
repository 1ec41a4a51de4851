// SPDX-License-Identifier: Apache-2.0
// A leader's relay on loopback with real sockets and keys, and a follower by hand.
#include "replica/relay.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../net/pool_sockets.h"
#include "../worker/pool_trainer.h"
#include "base/clock.h"
#include "wire/frame.h"
#include "wire/nest.h"

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

using net::Role;

class RelayTest : public net::PoolSocketsTest {
 protected:
  explicit RelayTest(std::vector<LeafReaders> leaves = {}) {
    nest_.tensor(0);
    RelayOptions options{.leader = "rank 0",
                         .keys = net::KeyPair::parse_secret(keys_.pair(Role::kWorker).secret_text().text()).value(),
                         .bind_host = "127.0.0.1",
                         .arena_bytes = 64 << 20,
                         .held_bytes_max = 1 << 20,
                         .followers = {{.name = "rank 1", .key = keys_.public_key(Role::kTrainer)}},
                         .leaves = std::move(leaves)};
    relay_ = Relay::start(std::move(options)).value();
    const auto& address = relay_->addresses().front();
    auto client = connect(net::Endpoint::parse(address.endpoint).value(), keys_.pair(Role::kTrainer),
                          keys_.public_key(Role::kWorker));
    expect_connected(*client);
    follower_ = std::make_unique<worker::PoolTrainer>(context_, *resolver_, std::move(client),
                                                      net::draw_run_id(keys_.public_key(Role::kTrainer)));
    follower_->begin(address.worker_id);
  }

  // The leader asks for the batch of one index, its sequence, and is given these tensors. Returns its batch.
  std::unique_ptr<loader::Batch> lead(int64_t sequence, const at::Tensor& tensor) {
    return lead(sequence, std::vector{tensor}, nest_);
  }
  std::unique_ptr<loader::Batch> lead(int64_t sequence, std::vector<at::Tensor> tensors, const wire::NestWriter& nest) {
    const auto number = static_cast<uint64_t>(sequence);
    const auto index = std::as_bytes(std::span(&sequence, 1));
    relay_->asked({.request = {.index_kind = wire::IndexKind::kIntegers, .sequence = number, .epoch = 1},
                   .indices = {index.begin(), index.end()}});
    const auto view = nest.view();
    loader::Arrival arrival{
        .epoch = 1,
        .sequence = number,
        .batch = loader::Batch::from_tensors(
            {.sequence = number, .epoch = 1},
            {.tensors = std::move(tensors), .boundary_keys = {}, .nest = {view.begin(), view.end()}}),
        .error = {}};
    relay_->arrived(arrival);
    return std::move(arrival.batch);
  }

  wire::NestWriter nest_;
  std::shared_ptr<Relay> relay_;  // shared with nobody here
  std::unique_ptr<worker::PoolTrainer> follower_;
};

TEST_F(RelayTest, HandsTheLeadersBatchOn) {
  lead(0, at::ones({5}));
  follower_->ask(0, {.indices = {0}});
  EXPECT_EQ(follower_->answer(0).kind, wire::AnswerKind::kBatch);
  EXPECT_EQ(relay_->handed_count(), 1u);
  EXPECT_FALSE(relay_->failure());
}

// The program was ended by std::terminate, and nobody knew why. No record can have a quantized tensor, which is our own
// fault to hand on, so the thread throws.
TEST_F(RelayTest, ThreadThatThrowsIsTheLeadersErrorAndNamesTheFollower) {
  lead(0, at::quantize_per_tensor(at::ones({5}), 1.0, 0, at::kQInt8));
  follower_->ask(0, {.indices = {0}});
  ASSERT_TRUE(follower_->serve_until([&] { return relay_->failure().has_value(); }));
  const std::string text = relay_->failure()->message;
  EXPECT_NE(text.find("pk_relay"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
  EXPECT_NE(text.find("not plain"), std::string::npos) << text;
}

// The leader reads the first tensor, and its follower the second one.
class DividingRelayTest : public RelayTest {
 protected:
  DividingRelayTest()
      : RelayTest({{.name = "0", .is_read_here = true, .followers = {false}},
                   {.name = "1", .is_read_here = false, .followers = {true}}}) {
    pair_.tuple(2), pair_.tensor(0), pair_.tensor(1);
  }

  wire::NestWriter pair_;
};

TEST_F(DividingRelayTest, EachRankHasItsLeavesAndPlaceholders) {
  const auto mine = lead(0, {at::full({100, 100}, 3.0), at::full({5}, 4.0)}, pair_);
  EXPECT_FALSE(mine->tensors().all()[0].is_meta());
  const at::Tensor placeholder = mine->tensors().all()[1];
  EXPECT_TRUE(placeholder.is_meta());
  EXPECT_EQ(placeholder.sizes().vec(), std::vector<int64_t>{5});
  EXPECT_EQ(placeholder.scalar_type(), at::kFloat);

  follower_->ask(0, {.indices = {0}});
  const auto& answer = follower_->answer(0);
  ASSERT_EQ(answer.kind, wire::AnswerKind::kBatch);
  const auto record = std::span(answer.payload).last(answer.record_bytes);
  const wire::Frame frame = wire::parse_frame(record).value();
  EXPECT_EQ(frame.tensors[0].encoding, wire::Encoding::kWithheld);
  EXPECT_EQ(frame.tensors[0].shape, (std::vector<int64_t>{100, 100}));
  EXPECT_EQ(frame.tensors[1].bytes, 5 * sizeof(float));
  EXPECT_LT(answer.payload.size(), 1000u);  // without the 40,000 bytes of the first tensor
}

TEST_F(DividingRelayTest, ABatchWithoutANamedLeafIsAnErrorOnAllRanks) {
  const auto mine = lead(0, at::ones({5}));
  ASSERT_TRUE(mine->record().remote_error());
  EXPECT_EQ(mine->record().remote_error()->type_name, "ValueError");
  follower_->ask(0, {.indices = {0}});
  const auto& answer = follower_->answer(0);
  EXPECT_EQ(answer.kind, wire::AnswerKind::kError);
  EXPECT_NE(answer.text.find("leaves must name tensors of the batch, got '0'"), std::string::npos) << answer.text;
}

}  // namespace
}  // namespace penstock::replica
