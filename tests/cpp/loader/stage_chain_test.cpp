// SPDX-License-Identifier: Apache-2.0
// How batches go through stages: how many at once, which first, and what happens when a device is full or lost.
#include "loader/stage_chain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../base/seeded_test.h"
#include "base/mutex.h"
#include "fake_device.h"
#include "loader/copy_stage.h"
#include "slab_batches.h"

namespace penstock::loader {
namespace {

using Kind = Arrival::Kind;

constexpr uint64_t kBatchBytes = 8000;  // of 1,000 numbers

class StageChainTest : public test::SeededTest {
 protected:
  void start(uint64_t staged_bytes_max) {
    Stages stages{.in_order = {}, .staged_bytes_max = staged_bytes_max};
    stages.in_order.push_back(std::make_unique<CopyStage>(std::make_unique<FakeDevice>(gpu_)));
    const auto started = chain_->start(std::move(stages));
    ASSERT_TRUE(started) << started.error().message;
    inbox_.set_epochs(1, 1);
  }
  void TearDown() override {
    gpu_.let_go();
    inbox_.close();
    chain_.reset();
    EXPECT_EQ(batches_.free_count() + batches_.arena().slab_count() - batches_.arena().alive_count(),
              batches_.arena().slab_count());
    gpu_.wait_until_idle();
    EXPECT_EQ(gpu_.used_bytes(), 0u);
  }

  void arrive(uint64_t sequence, uint32_t epoch = 1) {
    auto batch = batches_.make(static_cast<int64_t>(sequence), 1000, 1, {.sequence = sequence, .epoch = epoch});
    ASSERT_NE(batch, nullptr);
    chain_->arrive({.epoch = epoch, .sequence = sequence, .batch = std::move(batch), .error = {}});
  }
  Arrival next() {
    if (!inbox_.wait_until(std::chrono::steady_clock::now() + std::chrono::seconds(30)))
      throw std::runtime_error("nothing arrived");
    return *inbox_.try_pop();
  }
  // Batches whose arrival comes before that of something handed over now. Nothing waits behind a batch that waits.
  std::vector<Arrival> those_let_through() {
    chain_->arrive({.kind = Kind::kGone, .batch = {}, .error = {}});
    std::vector<Arrival> arrivals;
    for (Arrival arrival = next(); arrival.kind != Kind::kGone; arrival = next())
      arrivals.push_back(std::move(arrival));
    return arrivals;
  }
  static std::vector<uint64_t> sequences_of(const std::vector<Arrival>& arrivals) {
    std::vector<uint64_t> sequences;
    for (const Arrival& arrival : arrivals) sequences.push_back(arrival.sequence);
    return sequences;
  }
  // As the trainer does: its stream sees the values of the batch.
  void take(Arrival arrival) {
    ASSERT_EQ(arrival.kind, Kind::kBatch);
    ASSERT_FALSE(arrival.batch->record().remote_error()) << arrival.batch->record().remote_error()->text;
    ASSERT_TRUE(chain_->finish(*arrival.batch));
    gpu_.run_on_current(
        [tensor = arrival.batch->tensors().all().at(0), value = static_cast<int64_t>(arrival.sequence)] {
          EXPECT_TRUE(is_all(tensor, value)) << value;
        });
  }

  using Sequences = std::vector<uint64_t>;

  FakeGpu gpu_;
  SlabBatches batches_{16};
  Inbox inbox_{64};
  std::unique_ptr<StageChain> chain_ = std::make_unique<StageChain>(inbox_, 64);
};

// Holds the chain's thread at the first arrival until it may go on.
class HoldingTap final : public ArrivalTap {
 public:
  void asked(const session::RequestContent&) override {}
  void arrived(Arrival&) override { may_go_on_.wait(); }
  void source_stopped() override {}
  std::optional<Fault> failure() const override { return failure_.get(); }

  void go_on() { go_on_.set_value(); }
  void fail(const std::string& message) { failure_.set(Fault{Errc::kFailed, message}); }

 private:
  std::promise<void> go_on_;
  std::shared_future<void> may_go_on_ = go_on_.get_future().share();
  Board<std::optional<Fault>> failure_;
};

TEST_F(StageChainTest, WhatATapFailsWithIsTheErrorOfTheTrainersNextCall) {
  const auto tap = std::make_shared<HoldingTap>();
  tap->go_on();
  ASSERT_TRUE(chain_->start({.in_order = {}, .tap = tap}));
  inbox_.set_epochs(1, 1);
  arrive(0);
  arrive(1);
  EXPECT_TRUE(chain_->finish(*next().batch));
  tap->fail("the thread pk_relay failed");
  const auto finished = chain_->finish(*next().batch);
  ASSERT_FALSE(finished);
  EXPECT_EQ(finished.error().message, "the thread pk_relay failed");
}

TEST_F(StageChainTest, WithoutStagesArrivalsAreInTheInboxAtOnce) {
  ASSERT_TRUE(chain_->start({}));
  inbox_.set_epochs(1, 1);
  arrive(3);
  ASSERT_EQ(inbox_.arrival_count(), 1u);
  const Arrival arrival = *inbox_.try_pop();
  EXPECT_NE(arrival.batch->tensors().lease(), nullptr);
  EXPECT_TRUE(chain_->finish(*arrival.batch));
}

// The thread that answers leases widened batches, and lost its workers while it did.
TEST_F(StageChainTest, NarrowBatchesAreWidenedByTheChainsThread) {
  const auto tap = std::make_shared<HoldingTap>();
  ASSERT_TRUE(chain_->start({.in_order = {}, .wide_bytes = 1 << 20, .tap = tap}));
  inbox_.set_epochs(1, 1);
  chain_->arrive({.kind = Kind::kEnd, .epoch = 1, .batch = {}, .error = {}});  // which holds the thread
  std::mt19937_64 random(1);
  const auto sample = wire::random_narrow(wire::Encoding::kRows, 10, random);
  chain_->arrive({.epoch = 1,
                  .batch = batches_.make_narrow({&sample, 1}, {.epoch = 1}),
                  .narrow = NarrowArrival{.place = "worker 5"},
                  .error = {}});
  EXPECT_EQ(inbox_.arrival_count(), 0u);
  tap->go_on();
  EXPECT_EQ(next().kind, Kind::kEnd);
  const Arrival arrival = next();
  ASSERT_FALSE(arrival.batch->record().remote_error());
  EXPECT_TRUE(has_bytes(arrival.batch->tensors().all().at(0), sample.widened()));
}

TEST_F(StageChainTest, NarrowBatchThatCannotBeWidenedIsAnErrorThatNamesItsWorker) {
  ASSERT_TRUE(chain_->start({.in_order = {}, .wide_bytes = 1 << 20}));
  inbox_.set_epochs(1, 1);
  std::mt19937_64 random(1);
  auto sample = wire::random_narrow(wire::Encoding::kRows, 10, random);
  sample.narrow[7] = std::byte{0x80};  // the highest byte of the first row's number
  chain_->arrive({.epoch = 1,
                  .sequence = 3,
                  .batch = batches_.make_narrow({&sample, 1}, {.sequence = 3, .epoch = 1}),
                  .narrow = NarrowArrival{.place = "worker 5 at tcp://a:1"},
                  .error = {}});
  const Arrival arrival = next();
  EXPECT_EQ(arrival.batch->record().facts().sequence, 3u);
  ASSERT_TRUE(arrival.batch->record().remote_error());
  EXPECT_EQ(arrival.batch->record().remote_error()->worker, "worker 5 at tcp://a:1");
}

TEST_F(StageChainTest, BatchesThatAreNotNarrowDoNotWaitForTheThreadThatWidensOthers) {
  ASSERT_TRUE(chain_->start({.in_order = {}, .wide_bytes = 1 << 20}));
  inbox_.set_epochs(1, 1);
  arrive(3);
  EXPECT_EQ(inbox_.arrival_count(), 1u);
  inbox_.clear();
}

TEST_F(StageChainTest, BatchesAreGivenOutWhileTheirCopiesAreHeld) {
  gpu_.hold();
  start(0);
  for (uint64_t sequence = 0; sequence < 10; ++sequence) arrive(sequence);
  for (uint64_t sequence = 0; sequence < 10; ++sequence) take(next());
  EXPECT_EQ(batches_.free_count(), 6u);
}

TEST_F(StageChainTest, BeyondTheBoundBatchesWaitUntilOthersWereGivenOut) {
  start(2 * kBatchBytes);
  for (uint64_t sequence = 0; sequence < 6; ++sequence) arrive(sequence);
  auto first = those_let_through();
  EXPECT_EQ(sequences_of(first), (Sequences{0, 1}));
  EXPECT_EQ(gpu_.used_bytes(), 2 * kBatchBytes);
  take(std::move(first[1]));
  take(next());
  EXPECT_TRUE(those_let_through().size() == 1) << "the next one in the place of each";
}

// 8,000 bytes each once they are widened, and 1,024 before.
TEST_F(StageChainTest, TheBoundCountsNarrowBytesAndThoseThatTheyBecome) {
  constexpr uint64_t kStagedBytes = 8000 + 1024;
  for (const uint64_t bound : {2 * kStagedBytes, 2 * kStagedBytes - 1}) {
    start(bound);
    EXPECT_TRUE(chain_->takes_narrow());
    std::mt19937_64 random(1);
    wire::NarrowSample sample{.entry = wire::make_entry(4, {1000}), .narrow = wire::random_bytes(1008, random)};
    sample.entry.encoding = wire::Encoding::kOffset8;
    sample.entry.bytes = 1008;
    for (uint64_t sequence = 0; sequence < 3; ++sequence) {
      auto batch = batches_.make_narrow({&sample, 1}, {.sequence = sequence, .epoch = 1});
      ASSERT_TRUE(batch->tensors().check_narrow());
      ASSERT_TRUE(batch->tensors().try_keep_narrow());
      EXPECT_EQ(batch->record().bytes() + batch->record().wide_bytes(), kStagedBytes);
      chain_->arrive({.epoch = 1, .sequence = sequence, .batch = std::move(batch), .error = {}});
    }
    const size_t staged_count = bound == 2 * kStagedBytes ? 2 : 1;
    EXPECT_EQ(those_let_through().size(), staged_count);
    chain_.reset();
    inbox_.clear();
    chain_ = std::make_unique<StageChain>(inbox_, 64);
  }
}

TEST_F(StageChainTest, ABatchThatIsDroppedMakesRoomOnceTheTrainerWaits) {
  start(kBatchBytes);
  arrive(0);
  arrive(1);
  { const auto dropped = those_let_through(); }
  chain_->await(1, 1);
  EXPECT_EQ(next().sequence, 1u);
}

TEST_F(StageChainTest, OneBatchMayAlwaysGo) {
  start(1);
  for (uint64_t sequence = 0; sequence < 5; ++sequence) arrive(sequence);
  for (uint64_t sequence = 0; sequence < 5; ++sequence) {
    Arrival arrival = next();
    EXPECT_EQ(arrival.sequence, sequence);
    take(std::move(arrival));
  }
}

TEST_F(StageChainTest, TheBatchThatTheTrainerWaitsForGoesBeyondTheBound) {
  start(kBatchBytes);
  for (const uint64_t sequence : {7, 5, 6}) arrive(sequence);
  const auto staged = those_let_through();
  EXPECT_EQ(sequences_of(staged), (Sequences{7}));
  chain_->await(1, 4);
  arrive(4);
  EXPECT_EQ(next().sequence, 4u);
  EXPECT_EQ(those_let_through().size(), 0u) << "and no other with it";
  chain_->await(1, 6);
  EXPECT_EQ(next().sequence, 6u);
}

TEST_F(StageChainTest, ATrainerThatTakesAnyBatchOfAnEpochWaitsForNoneOfTheNext) {
  start(kBatchBytes);
  inbox_.set_epochs(1, 2);
  arrive(0, /*epoch=*/2);
  const auto early = those_let_through();
  arrive(9);
  EXPECT_EQ(those_let_through().size(), 0u);
  chain_->await(1, std::nullopt);
  EXPECT_EQ(next().sequence, 9u);
}

TEST_F(StageChainTest, WhatIsNoBatchWaitsForNoRoom) {
  start(1);
  arrive(1);
  arrive(2);
  chain_->arrive({.kind = Kind::kEnd, .epoch = 1, .sequence = 3, .batch = {}, .error = {}});
  chain_->fail(0, {Errc::kFailed, "gone"});
  chain_->arrive({.kind = Kind::kNews, .batch = {}, .error = Fault{Errc::kFailed, "news"}});
  std::vector<Arrival> arrivals;  // kept, since a batch that is dropped makes room
  std::vector<Kind> kinds;
  for (int count = 0; count < 4; ++count) {
    arrivals.push_back(next());
    kinds.push_back(arrivals.back().kind);
  }
  std::sort(kinds.begin(), kinds.end());
  EXPECT_EQ(kinds, (std::vector<Kind>{Kind::kBatch, Kind::kEnd, Kind::kNews, Kind::kFailed}));
}

TEST_F(StageChainTest, AnErrorInPlaceOfABatchGoesThroughAsItIs) {
  start(1);
  chain_->arrive({.epoch = 1, .batch = Batch::from_error({.epoch = 1}, {"KeyError", "why", {}}), .error = {}});
  EXPECT_EQ(next().batch->record().remote_error()->text, "why");
}

TEST_F(StageChainTest, BatchesOfAnEpochThatIsOverAreDroppedWhereTheyWait) {
  start(kBatchBytes);
  for (uint64_t sequence = 0; sequence < 5; ++sequence) arrive(sequence);
  auto of_the_first = those_let_through();
  gpu_.wait_until_idle();
  inbox_.set_epochs(2, 2);
  of_the_first.clear();  // not before, since it makes room for another batch of its epoch
  arrive(0, /*epoch=*/2);
  const auto staged = those_let_through();
  ASSERT_EQ(staged.size(), 1u);
  EXPECT_EQ(staged.front().epoch, 2u);
  gpu_.wait_until_idle();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (batches_.free_count() < 14 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();  // the chain looks for copies that are over now and then
  EXPECT_GE(batches_.free_count(), 14u);
}

TEST_F(StageChainTest, AFullDeviceHoldsBatchesBackUntilTheTrainerWaits) {
  gpu_.set_memory_bytes(2 * kBatchBytes);
  start(100 * kBatchBytes);
  for (uint64_t sequence = 0; sequence < 4; ++sequence) arrive(sequence);
  auto staged = those_let_through();
  EXPECT_EQ(sequences_of(staged), (Sequences{0, 1}));
  for (const uint64_t sequence : {2, 3}) {
    take(std::move(staged[sequence - 2]));
    gpu_.wait_until_idle();  // its memory is free
    chain_->await(1, sequence);
    EXPECT_EQ(next().sequence, sequence);
  }
}

TEST_F(StageChainTest, MemoryThatNeverComesIsAnErrorInPlaceOfTheBatchAlone) {
  gpu_.set_memory_bytes(kBatchBytes);
  start(100 * kBatchBytes);
  for (uint64_t sequence = 0; sequence < 3; ++sequence) arrive(sequence);
  auto staged = those_let_through();
  chain_->await(1, 1);
  const Arrival failed = next();
  EXPECT_EQ(failed.sequence, 1u);
  ASSERT_TRUE(failed.batch->record().remote_error());
  EXPECT_EQ(failed.batch->record().remote_error()->type_name, "torch.OutOfMemoryError");
  EXPECT_NE(failed.batch->record().remote_error()->text.find("8000 bytes hold batches that were copied ahead"),
            std::string::npos)
      << failed.batch->record().remote_error()->text;
  take(std::move(staged[0]));
  staged.clear();
  gpu_.wait_until_idle();
  chain_->await(1, 2);
  take(next());
}

TEST_F(StageChainTest, ALostDeviceIsAnErrorInPlaceOfEachBatch) {
  start(100 * kBatchBytes);
  gpu_.hold();
  arrive(0);
  const auto staged = those_let_through();
  gpu_.lose();
  for (uint64_t sequence = 1; sequence < 4; ++sequence) arrive(sequence);
  for (uint64_t sequence = 1; sequence < 4; ++sequence) {
    const Arrival failed = next();
    EXPECT_EQ(failed.sequence, sequence);
    ASSERT_TRUE(failed.batch->record().remote_error());
    EXPECT_EQ(failed.batch->record().remote_error()->type_name, "RuntimeError");
  }
  EXPECT_FALSE(chain_->finish(*staged.front().batch));
}

TEST_F(StageChainTest, AStageThatThrowsIsAnErrorOfTheThreadAndHoldsNobodyUp) {
  struct Thrower final : public BatchStage {
    Result<void> begin(Batch&) override { throw std::runtime_error("thrown by a test"); }
    Result<void> finish(Batch&) override { return {}; }
    bool takes_narrow() const override { return false; }
    size_t reclaim() override { return 0; }
  };
  Stages stages;
  stages.in_order.push_back(std::make_unique<Thrower>());
  ASSERT_TRUE(chain_->start(std::move(stages)));
  inbox_.set_epochs(1, 1);
  arrive(0);
  const Arrival failed = next();
  EXPECT_EQ(failed.kind, Kind::kFailed);
  EXPECT_NE(failed.error->message.find("pk_stages"), std::string::npos) << failed.error->message;
  EXPECT_NE(failed.error->message.find("thrown by a test"), std::string::npos);
  for (uint64_t sequence = 1; sequence < 10; ++sequence) arrive(sequence);
}

TEST_F(StageChainTest, StoppedAtAnyMomentItLeavesNothingBehind) {
  for (int round = 0; round < 50; ++round) {
    if (round % 2 == 0) gpu_.shuffle(draw<uint64_t>(0, 1'000'000));
    Inbox inbox(64);
    inbox.set_epochs(1, 1);
    StageChain chain(inbox, 4);
    Stages stages{.in_order = {}, .staged_bytes_max = draw<uint64_t>(0, 6) * kBatchBytes};
    stages.in_order.push_back(std::make_unique<CopyStage>(std::make_unique<FakeDevice>(gpu_)));
    ASSERT_TRUE(chain.start(std::move(stages)));
    {
      std::jthread receiver([&] {
        for (uint64_t sequence = 0; sequence < 16; ++sequence) {
          auto batch = batches_.make(1, 1000, 1, {.sequence = sequence, .epoch = 1});
          if (batch) chain.arrive({.epoch = 1, .sequence = sequence, .batch = std::move(batch), .error = {}});
        }
      });
      const int taken_count = draw(0, 3);
      for (int count = 0; count < taken_count; ++count) {
        chain.await(1, std::nullopt);
        inbox.wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(draw(0, 2)));
        if (auto arrival = inbox.try_pop()) static_cast<void>(chain.finish(*arrival->batch));
      }
      inbox.close();
      chain.close();
    }
    chain.stop();
    ASSERT_EQ(batches_.free_count(), 16u) << "round " << round;
    gpu_.wait_until_idle();
    ASSERT_EQ(gpu_.used_bytes(), 0u);
  }
}

}  // namespace
}  // namespace penstock::loader
