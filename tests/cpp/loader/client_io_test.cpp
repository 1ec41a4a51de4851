// SPDX-License-Identifier: Apache-2.0
#include "loader/client_io.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace penstock::loader {
namespace {

using wire::BatchKey;
using wire::ToJob;

constexpr Instant kStart{std::chrono::seconds(100)};

LocalDispatch::Message message_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

session::SharedContent content_of(const std::string& text) {
  return std::make_shared<const session::RequestContent>(
      session::RequestContent{.request = {}, .indices = message_of(text)});
}

// Of a request the bytes after its head; of an announcement, all.
std::string text_of(const LocalDispatch::Message& message) {
  const size_t head_bytes = wire::parse_to_job(message) ? wire::kToJobHeadBytes : 0;
  return {reinterpret_cast<const char*>(message.data()) + head_bytes, message.size() - head_bytes};
}

class LocalDispatchTest : public testing::Test {
 protected:
  void ask(uint32_t epoch, uint64_t sequence) {
    dispatch_.ask({epoch, sequence}, content_of(std::to_string(epoch) + "/" + std::to_string(sequence)), now_);
  }
  // The messages sent now: "worker message", in order.
  std::vector<std::string> sent() {
    std::vector<std::string> texts;
    for (const auto& send : dispatch_.take_sends()) {
      texts.push_back(std::to_string(send.worker_id) + " " + text_of(send.message));
    }
    return texts;
  }
  bool answer(uint32_t worker_id, uint32_t epoch, uint64_t sequence, std::chrono::milliseconds after,
              bool dataset_stays = false) {
    now_ += after;
    return dispatch_.answered(worker_id, {epoch, sequence}, dataset_stays, now_);
  }
  // Worker 0 has batch 0 of epoch 1 for long, while the other one makes 20 more.
  void wait_for_worker_0(bool dataset_stays) {
    dispatch_.worker_joined(0, now_);
    dispatch_.worker_joined(1, now_);
    for (uint64_t sequence = 0; sequence <= 20; ++sequence) ask(1, sequence);
    for (uint64_t sequence = 1; sequence <= 20; ++sequence)
      EXPECT_TRUE(answer(1, 1, sequence, std::chrono::milliseconds(10), dataset_stays));
    sent();
  }
  using Texts = std::vector<std::string>;

  Instant now_ = kStart;
  LocalDispatch dispatch_{2, 2};
};

TEST_F(LocalDispatchTest, ARequestGoesToTheWorkerThatIsFree) {
  dispatch_.worker_joined(0, now_);
  dispatch_.worker_joined(1, now_);
  for (uint64_t sequence = 0; sequence < 4; ++sequence) ask(1, sequence);
  EXPECT_EQ(sent(), (Texts{"0 1/0", "1 1/1"})) << "before a batch has come each has one";
  EXPECT_TRUE(answer(1, 1, 1, std::chrono::milliseconds(50)));
  EXPECT_EQ(sent(), (Texts{"1 1/2"})) << "the other one is at work still";
  EXPECT_TRUE(answer(1, 1, 2, std::chrono::milliseconds(50)));
  EXPECT_EQ(sent(), (Texts{"1 1/3"})) << "where batches take long nothing waits behind one";
}

TEST_F(LocalDispatchTest, WhereBatchesAreQuickTheNextIsThereAlready) {
  dispatch_.worker_joined(0, now_);
  for (uint64_t sequence = 0; sequence < 4; ++sequence) ask(1, sequence);
  EXPECT_EQ(sent(), (Texts{"0 1/0"}));
  EXPECT_TRUE(answer(0, 1, 0, std::chrono::milliseconds(1)));
  EXPECT_EQ(sent(), (Texts{"0 1/1", "0 1/2"}));
}

TEST_F(LocalDispatchTest, WhatAWorkerOwedThatDiedIsAskedOfAnother) {
  dispatch_.worker_joined(0, now_);
  dispatch_.worker_joined(1, now_);
  ask(1, 0);
  ask(1, 1);
  sent();
  dispatch_.worker_died(0, now_);
  EXPECT_TRUE(dispatch_.has_workers());
  EXPECT_TRUE(answer(1, 1, 1, std::chrono::milliseconds(5)));
  EXPECT_EQ(sent(), (Texts{"1 1/0"}));
  dispatch_.worker_died(1, now_);
  EXPECT_FALSE(dispatch_.has_workers());
  EXPECT_TRUE(dispatch_.take_failures().empty());
}

TEST_F(LocalDispatchTest, ABatchThatKillsThreeWorkersFails) {
  LocalDispatch dispatch(4, 2);
  for (uint32_t worker_id = 0; worker_id < 4; ++worker_id) dispatch.worker_joined(worker_id, now_);
  dispatch.ask({1, 0}, content_of("deadly"), now_);
  for (int death = 0; death < 3; ++death) {
    const auto sends = dispatch.take_sends();
    ASSERT_EQ(sends.size(), 1u);
    dispatch.worker_died(sends[0].worker_id, now_);
  }
  const auto failures = dispatch.take_failures();
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].death_count, 3u);
}

TEST_F(LocalDispatchTest, ALateBatchIsAskedOfAnotherWhereDatasetsStayAsTheyAre) {
  wait_for_worker_0(true);
  EXPECT_TRUE(dispatch_.next_tick());
  dispatch_.tick(now_);
  EXPECT_EQ(sent(), (Texts{"1 1/0"}));
  EXPECT_EQ(dispatch_.hedge_count(), 1u);
  EXPECT_TRUE(answer(1, 1, 0, std::chrono::milliseconds(10), true));
  ask(1, 21);
  ask(1, 22);
  EXPECT_EQ(sent(), (Texts{"1 1/21"})) << "worker 0 is at the late batch still";
  EXPECT_FALSE(answer(0, 1, 0, std::chrono::milliseconds(10), true));
  EXPECT_EQ(sent(), (Texts{"0 1/22"}));
}

TEST_F(LocalDispatchTest, ALateWorkerThatDiesIsAskedForNothing) {
  wait_for_worker_0(true);
  dispatch_.tick(now_);
  EXPECT_TRUE(answer(1, 1, 0, std::chrono::milliseconds(10), true));
  dispatch_.worker_died(0, now_);
  EXPECT_TRUE(dispatch_.has_workers());
  EXPECT_FALSE(answer(0, 1, 0, std::chrono::milliseconds(10), true)) << "what it sent before";
  sent();
  ask(1, 21);
  ask(1, 22);
  EXPECT_EQ(sent(), (Texts{"1 1/21"}));
}

TEST_F(LocalDispatchTest, WorkersAreFreeForAnEpochWhateverTheyOweTheOneBefore) {
  dispatch_.worker_joined(0, now_);
  dispatch_.worker_joined(1, now_);
  ask(1, 0);
  ask(1, 1);
  sent();
  dispatch_.announce(ToJob::Kind::kEpoch, 2, message_of("epoch 2"), now_);
  ask(2, 0);
  ask(2, 1);
  EXPECT_EQ(sent(), (Texts{"0 epoch 2", "1 epoch 2", "0 2/0", "1 2/1"}));
}

TEST_F(LocalDispatchTest, ALateWorkerIsAskedAgainWhenAnEpochBegins) {
  wait_for_worker_0(true);
  dispatch_.tick(now_);
  EXPECT_TRUE(answer(1, 1, 0, std::chrono::milliseconds(10), true));
  sent();
  dispatch_.announce(ToJob::Kind::kEpoch, 2, message_of("epoch 2"), now_);
  ask(2, 0);
  ask(2, 1);
  EXPECT_EQ(sent(), (Texts{"0 epoch 2", "1 epoch 2", "0 2/0", "1 2/1"}));
  EXPECT_FALSE(answer(0, 1, 0, std::chrono::milliseconds(10), true));
  EXPECT_TRUE(answer(0, 2, 0, std::chrono::milliseconds(10), true));
}

TEST_F(LocalDispatchTest, AWorkerKnowsOfAnEpochBeforeItIsAskedForABatchOfIt) {
  dispatch_.worker_joined(0, now_);
  ask(1, 0);
  dispatch_.announce(ToJob::Kind::kEarlyEpoch, 2, message_of("early 2"), now_);
  ask(2, 0);
  sent();
  dispatch_.announce(ToJob::Kind::kEpoch, 2, message_of("epoch 2"), now_);
  EXPECT_EQ(sent(), (Texts{"0 epoch 2", "1 epoch 2", "0 2/0"}));
}

TEST_F(LocalDispatchTest, ADatasetThatMayWriteToItselfIsFetchedFromOnce) {
  wait_for_worker_0(false);
  EXPECT_FALSE(dispatch_.next_tick());
  dispatch_.tick(now_ + std::chrono::seconds(9));
  EXPECT_EQ(sent(), Texts{});
}

TEST_F(LocalDispatchTest, OneDatasetThatChangesEndsTheAsking) {
  wait_for_worker_0(true);
  ask(1, 21);
  EXPECT_TRUE(answer(1, 1, 21, std::chrono::milliseconds(10), false));
  sent();
  dispatch_.tick(now_);
  EXPECT_EQ(sent(), Texts{});
}

TEST_F(LocalDispatchTest, AnEarlyEpochIsToldWithItsFirstRequestAndAnEpochAtOnce) {
  dispatch_.worker_joined(0, now_);
  dispatch_.worker_joined(1, now_);
  ask(1, 0);
  ask(1, 1);
  ask(1, 2);
  sent();
  dispatch_.announce(ToJob::Kind::kEarlyEpoch, 2, message_of("early 2"), now_);
  ask(2, 0);
  EXPECT_TRUE(answer(0, 1, 0, std::chrono::milliseconds(9)));
  EXPECT_EQ(sent(), (Texts{"0 1/2"})) << "what this epoch needs comes first";
  EXPECT_TRUE(answer(1, 1, 1, std::chrono::milliseconds(9)));
  EXPECT_EQ(sent(), (Texts{"1 early 2", "1 2/0"}));
  dispatch_.announce(ToJob::Kind::kEpoch, 2, message_of("epoch 2"), now_);
  EXPECT_EQ(sent(), (Texts{"0 epoch 2", "1 epoch 2"}));
  EXPECT_FALSE(answer(0, 1, 2, std::chrono::milliseconds(9))) << "its epoch is over";
  EXPECT_TRUE(answer(1, 2, 0, std::chrono::milliseconds(9)));
}

}  // namespace
}  // namespace penstock::loader
