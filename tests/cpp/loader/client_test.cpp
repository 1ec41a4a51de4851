// SPDX-License-Identifier: Apache-2.0
// Streams from worker processes through the client, as a C++ training loop does.
#include "loader/client.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "stream_fixture.h"
#include "wire/nest.h"

namespace penstock::loader {
namespace {

class ClientTest : public StreamTest {
 protected:
  // Streams to the end of an epoch in which workers end, and returns the batches and those workers as they came.
  std::pair<std::vector<uint64_t>, std::vector<uint32_t>> finish_epoch_with_ends() {
    std::vector<uint64_t> sequences;
    std::vector<uint32_t> ended_workers;
    for (Event event = next(); event.kind != Event::Kind::kEnd; event = next()) {
      if (event.kind == Event::Kind::kShardEnded) {
        if (!event.is_worker_done) continue;
        ended_workers.push_back(event.worker_id);
        continue;
      }
      EXPECT_EQ(event.kind, Event::Kind::kBatch) << event.message();
      if (HasFailure()) break;
      sequences.push_back(event.batch->record().facts().sequence);
      expect_right(*event.batch);
    }
    return {sequences, ended_workers};
  }
};

TEST_F(ClientTest, HundredsOfBatchesComeInOrderWithTheirValues) {
  for (uint32_t worker_count = 1; worker_count <= 3; ++worker_count) {
    start({.worker_count = worker_count});
    epoch_ = 0;
    begin_epoch(draw_batches(300));
    EXPECT_EQ(finish_epoch(), counting(300));
    EXPECT_EQ(client_->counters().inline_batches.value(), 0u);
    EXPECT_EQ(client_->counters().arenas.value(), worker_count) << "one arena for each worker";
    TearDown();
  }
}

TEST_F(ClientTest, AHighPrefetchFactorChangesNothing) {
  start({.worker_count = 2, .prefetch_factor = 10});
  begin_epoch(draw_batches(200));
  EXPECT_EQ(finish_epoch(), counting(200));
}

TEST_F(ClientTest, InFreeOrderEveryBatchComesOnce) {
  start({.worker_count = 3, .overtaking_max = session::kAnyOrder});
  begin_epoch(draw_batches(300));
  auto sequences = finish_epoch();
  std::sort(sequences.begin(), sequences.end());
  EXPECT_EQ(sequences, counting(300));
}

TEST_F(ClientTest, EpochsThatWereLeftHalfwayLeaveNothingBehind) {
  start({.worker_count = 2});
  for (int epoch = 0; epoch < 12; ++epoch) {
    begin_epoch(draw_batches(40));
    const int consumed_count = draw(0, 40);
    for (int count = 0; count < consumed_count; ++count) {
      const auto batch = next_batch();
      ASSERT_NE(batch, nullptr);
      EXPECT_EQ(batch->record().facts().sequence, static_cast<uint64_t>(count));
      expect_right(*batch);
      if (HasFatalFailure()) return;
    }
  }
  begin_epoch(draw_batches(40));
  EXPECT_EQ(finish_epoch(), counting(40));
}

TEST_F(ClientTest, AUserWhoKeepsEveryBatchHasThemAllAndTheStreamGoesOn) {
  start({.worker_count = 2});
  begin_epoch(draw_batches(150));
  std::vector<std::vector<at::Tensor>> kept;
  for (int count = 0; count < 150; ++count) kept.push_back(next_batch()->tensors().all());
  EXPECT_EQ(next().kind, Event::Kind::kEnd);
  for (size_t sequence = 0; sequence < kept.size(); ++sequence) expect_right(kept[sequence], sequence);
  EXPECT_GE(client_->counters().copied_batches.value(), 140u) << "each arena has two slabs to spare";
  EXPECT_LE(client_->counters().arenas.value(), 2u);
}

TEST_F(ClientTest, AUserWhoDropsEveryBatchHasNoneCopied) {
  start({.worker_count = 1});
  begin_epoch(draw_batches(150));
  finish_epoch();
  EXPECT_EQ(client_->counters().copied_batches.value(), 0u);
}

TEST_F(ClientTest, TensorsOutliveTheirBatchAndTheirClient) {
  start({.worker_count = 1});
  begin_epoch(draw_batches(3));
  std::vector<at::Tensor> tensors = next_batch()->tensors().all();
  client_->stop();
  expect_right(tensors, 0);
  client_.reset();
  expect_right(tensors, 0);
}

TEST_F(ClientTest, EveryTensorHasAStorageOfExactlyItsBytesThatCannotGrow) {
  start({.worker_count = 1});
  begin_epoch(draw_batches(10));
  for (int count = 0; count < 10; ++count) {
    const auto batch = next_batch();
    for (const at::Tensor& tensor : batch->tensors().all()) {
      EXPECT_EQ(tensor.storage().nbytes(), static_cast<size_t>(tensor.numel()) * tensor.element_size());
      EXPECT_FALSE(tensor.storage().resizable());
      EXPECT_EQ(tensor.storage_offset(), 0);
    }
  }
}

TEST_F(ClientTest, BatchesAboveHalfTheArenaComeThroughArenasOfTheirOwn) {
  start({.worker_count = 2});
  auto batches = draw_batches(60);
  for (size_t sequence = 0; sequence < batches.size(); sequence += 3) batches[sequence].front() = test::kLarge;
  begin_epoch(std::move(batches));
  EXPECT_EQ(finish_epoch(), counting(60));
  EXPECT_GE(client_->counters().arenas.value(), 20u);
}

TEST_F(ClientTest, LargeBatchesThatTheUserKeepsStayAsTheyAre) {
  start({.worker_count = 1});
  begin_epoch(std::vector<Indices>(12, Indices{test::kLarge + 3, 4}));
  std::vector<std::vector<at::Tensor>> kept;
  for (int count = 0; count < 12; ++count) kept.push_back(next_batch()->tensors().all());
  for (size_t sequence = 0; sequence < kept.size(); ++sequence) expect_right(kept[sequence], sequence);
}

TEST_F(ClientTest, WithoutSharedMemoryBatchesComeThroughTheSocket) {
  start({.worker_count = 1}, {.file_bytes_max = 4096});
  begin_epoch(draw_batches(50));
  EXPECT_EQ(finish_epoch(), counting(50));
  EXPECT_EQ(client_->counters().inline_batches.value(), 50u);
  EXPECT_EQ(client_->counters().arenas.value(), 0u);
}

TEST_F(ClientTest, TheNestSaysWhereTheTensorsSit) {
  start({.worker_count = 1});
  begin_epoch({{1, 2}});
  const auto batch = next_batch();
  wire::NestReader nest(batch->record().frame().nest);
  const auto tuple = nest.next().value();
  EXPECT_EQ(tuple.tag, wire::NestTag::kTuple);
  ASSERT_EQ(tuple.count, 4u);
  for (uint32_t index = 0; index < 3; ++index) EXPECT_EQ(nest.next().value().count, index);
  EXPECT_EQ(nest.next().value().text, "batch");
}

TEST_F(ClientTest, ABatchThatRaisesIsMarkedAndTheNextOnesCome) {
  start({.worker_count = 1});
  begin_epoch({{1}, {test::kRaise}, {2}});
  EXPECT_FALSE(next_batch()->record().raises());
  EXPECT_TRUE(next_batch()->record().raises());
  EXPECT_FALSE(next_batch()->record().raises());
  EXPECT_EQ(next().kind, Event::Kind::kEnd);
}

TEST_F(ClientTest, AWorkerWhoseShareHasEndedLeavesAndTheOthersServeOn) {
  start({.worker_count = 2});
  begin_epoch({{1}, {2}, {test::kEnd}, {3}, {4}, {5}, {6}});
  const auto [sequences, ended_workers] = finish_epoch_with_ends();
  EXPECT_EQ(ended_workers, std::vector<uint32_t>{0});
  // Request 4 is lost too when it had gone to worker 0 before the news of its end came.
  const std::vector<uint64_t> without_four = {0, 1, 3, 5, 6};
  const std::vector<uint64_t> with_four = {0, 1, 3, 4, 5, 6};
  EXPECT_TRUE(sequences == without_four || sequences == with_four) << testing::PrintToString(sequences);
  expect_worker_ends(0, "exit 0");
}

TEST_F(ClientTest, AWorkerWithTwoShardsLeavesWhenBothHaveEnded) {
  start({.worker_count = 2, .shard_count = 4});
  begin_epoch({{1}, {2}, {3}, {4}, {test::kEnd}, {5}, {test::kEnd}, {6}, {7}, {8}, {9}});
  const auto [sequences, ended_workers] = finish_epoch_with_ends();
  // Request 9 is lost when it had gone to shard 2 before the news of its end came.
  const std::vector<uint64_t> without_nine = {0, 1, 2, 3, 5, 7, 8, 10};
  const std::vector<uint64_t> with_nine = {0, 1, 2, 3, 5, 7, 8, 9, 10};
  EXPECT_TRUE(sequences == without_nine || sequences == with_nine) << testing::PrintToString(sequences);
  EXPECT_EQ(ended_workers, std::vector<uint32_t>{0}) << "told at the end of its second shard";
  expect_worker_ends(0, "exit 0");
}

TEST_F(ClientTest, PersistentWorkersStayWhenTheirShareHasEndedAndServeTheNextEpoch) {
  start({.worker_count = 2, .keep_workers = true});
  for (int epoch = 0; epoch < 5; ++epoch) {
    begin_epoch({{1}, {2}, {test::kEnd}, {test::kEnd}});
    const auto [sequences, ended_workers] = finish_epoch_with_ends();
    EXPECT_EQ(sequences, counting(2));
    EXPECT_EQ(ended_workers.size(), 2u);
  }
}

TEST_F(ClientTest, AnEpochWithoutRequestsEndsAtOnce) {
  start({.worker_count = 1});
  begin_epoch({});
  EXPECT_EQ(next().kind, Event::Kind::kEnd);
}

TEST_F(ClientTest, AResumedEpochIsNumberedFromWhereItWas) {
  start({.worker_count = 2});
  client_->begin_epoch({}, {.sequence = 5, .shard_id = 1});
  const Indices indices = {1, 2};
  for (int request = 0; request < 3; ++request) {
    ASSERT_TRUE(client_->submit({.kind = wire::IndexKind::kIntegers, .body = std::as_bytes(std::span(indices))}));
  }
  for (uint64_t sequence = 5; sequence < 8; ++sequence) {
    const Event event = next();
    ASSERT_EQ(event.kind, Event::Kind::kBatch) << event.message();
    EXPECT_EQ(event.batch->record().facts().sequence, sequence);
    EXPECT_EQ(event.shard_id, sequence % 2);
    EXPECT_EQ(event.worker_id, sequence % 2);
  }
}

TEST_F(ClientTest, WaitingTimesAndBytesAreCounted) {
  start({.worker_count = 1});
  begin_epoch(std::vector<Indices>(20, Indices{4}));
  for (int count = 0; count < 20; ++count) client_->count_delivered(*next_batch());
  EXPECT_EQ(client_->counters().batches.value(), 20u);
  EXPECT_GT(client_->counters().fetch_ns.value(), 0u);
  EXPECT_GT(client_->counters().waits.value(), 0u);
  EXPECT_GE(client_->counters().batch_bytes.value(), 20u * 16'000) << "4000 floats a batch";
}

TEST_F(ClientTest, ClientThatIsNeverStartedIsDroppedWithItsWorkersStillStarting) {
  client_ = std::make_shared<Client>(ClientOptions{.worker_count = 1});
  worker_pids_.push_back(test::start_worker(*client_, {}));
  ASSERT_GT(worker_pids_.back(), 0);
}

}  // namespace
}  // namespace penstock::loader
