// SPDX-License-Identifier: Apache-2.0
// Trains, so to speak, without Python: epochs, resuming and the death of a worker through Stream alone, against worker
// processes.
#include "loader/stream.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>

#include <csignal>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "stream_fixture.h"

namespace penstock::loader {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

// A sampler of the user's: these batches, and an exception in the place of an empty one.
class ListedIndices : public IndexSource {
 public:
  explicit ListedIndices(std::vector<std::vector<int64_t>> batches) : batches_(std::move(batches)) {}

  std::optional<IndexSource::Indices> next() override {
    if (place_ == batches_.size()) return std::nullopt;
    const auto& batch = batches_[place_++];
    if (batch.empty()) throw std::runtime_error("the sampler failed");
    return IndexSource::Indices{.kind = wire::IndexKind::kIntegers, .body = std::as_bytes(std::span(batch))};
  }

 private:
  std::vector<std::vector<int64_t>> batches_;
  size_t place_ = 0;
};

class WholeStreamTest : public StreamTest {
 protected:
  void start_stream(const ClientOptions& options, const StreamOptions& stream_options = {}) {
    start(options);
    stream_ = std::make_unique<Stream>(client_, stream_options);
    epoch_ = 0;
  }
  void TearDown() override {
    stream_.reset();
    StreamTest::TearDown();
  }

  // Begins an epoch of torch's own sampler, and notes the batches that it must give.
  void begin(const TorchSamplerOptions& sampler, EpochPlan plan = {}) {
    ++epoch_;
    expect(sampler);
    stream_->begin_epoch(std::move(plan), sampler);
  }
  void begin_listed(std::vector<Indices> batches, EpochPlan plan = {}) {
    ++epoch_;
    batches_ = batches;
    stream_->begin_epoch(std::move(plan), std::make_unique<ListedIndices>(std::move(batches)));
  }
  void expect(TorchSamplerOptions sampler) {
    if (sampler.generator) sampler.generator = sampler.generator->clone();
    TorchSampler expected(std::move(sampler));
    batches_.clear();
    while (const auto indices = expected.next_integers()) batches_.emplace_back(indices->begin(), indices->end());
  }

  Event take() { return stream_->next(steady_clock::now() + seconds(30)); }

  // The sequences of the rest of the epoch, each batch compared with the one that it must be.
  std::vector<uint64_t> finish() {
    std::vector<uint64_t> sequences;
    Event event = take();
    for (; event.kind == Event::Kind::kBatch && !HasFatalFailure(); event = take()) {
      sequences.push_back(event.batch->record().facts().sequence);
      expect_right(*event.batch);
    }
    EXPECT_EQ(event.kind, Event::Kind::kEnd) << event.message();
    return sequences;
  }
  static std::vector<uint64_t> from_to(uint64_t first, uint64_t last) {
    std::vector<uint64_t> numbers;
    for (uint64_t number = first; number < last; ++number) numbers.push_back(number);
    return numbers;
  }

  static TorchSamplerOptions shuffled(int64_t sample_count, uint64_t seed) {
    return {.sample_count = sample_count,
            .batch_size = 10,
            .shuffle = true,
            .generator = at::detail::createCPUGenerator(seed)};
  }

  std::unique_ptr<Stream> stream_;
};

TEST_F(WholeStreamTest, AnEpochOfTorchsSamplerComesInOrderAndIsCounted) {
  start_stream({.worker_count = 2});
  for (const bool shuffle : {false, true}) {
    TorchSamplerOptions options = shuffled(1003, seed());
    options.shuffle = shuffle;
    begin(options);
    EXPECT_EQ(finish(), counting(101));
    EXPECT_EQ(stream_->progress()->answered_count(), 101u);
    EXPECT_EQ(stream_->progress()->yielded_count(), 101u);
    EXPECT_TRUE(stream_->progress()->is_finished());
  }
  EXPECT_EQ(client_->counters().batches.value(), 202u);
}

TEST_F(WholeStreamTest, ASamplerOfTheUsersIsPulledOnceForEachBatchThatIsGiven) {
  start_stream({.worker_count = 2, .prefetch_factor = 2});
  begin_listed(draw_batches(40));
  EXPECT_EQ(client_->undelivered_count(), 4u);
  for (int count = 0; count < 30; ++count) {
    ASSERT_EQ(take().kind, Event::Kind::kBatch);
    EXPECT_EQ(client_->undelivered_count(), 4u);
  }
  EXPECT_EQ(finish(), from_to(30, 40));
}

TEST_F(WholeStreamTest, WhatTheSamplerThrowsLeavesTheCallThatPulledItAndTheNextBatchesCome) {
  start_stream({.worker_count = 1, .prefetch_factor = 2});
  begin_listed({{1}, {2}, {}, {3}});
  EXPECT_THROW(take(), std::runtime_error) << "in the place of batch 0, whose successor it was";
  batches_ = {{1}, {2}, {3}};
  EXPECT_EQ(finish(), from_to(1, 3));
}

TEST_F(WholeStreamTest, AnEpochIsResumedInAnotherStreamWhereItWasLeft) {
  start_stream({.worker_count = 2}, {.is_seeded_by_batch = true});
  begin(shuffled(300, 5), {.seeds = {.base_seed = 7}});
  for (int count = 0; count < 11; ++count) ASSERT_EQ(take().kind, Event::Kind::kBatch);
  const auto left = stream_->progress();
  TearDown();
  start_stream({.worker_count = 2}, {.is_seeded_by_batch = true});
  auto progress = std::make_shared<EpochProgress>(2);
  progress->resume(left->answered_count(), left->yielded_count(), left->last_shard_id());
  begin(shuffled(300, 5), {.seeds = {.base_seed = 7}, .progress = progress});
  EXPECT_EQ(finish(), from_to(11, 30));
  EXPECT_EQ(progress->answered_count(), 30u);
}

TEST_F(WholeStreamTest, TheDeathOfAWorkerIsToldAndTheStreamEnds) {
  start_stream({.worker_count = 2, .prefetch_factor = 2});
  begin_listed({{1}, {2}, {3}, {test::kStall}, {4}, {5}, {6}, {7}});
  for (int count = 0; count < 4; ++count) ASSERT_EQ(take().kind, Event::Kind::kBatch);
  ::kill(worker_pids_[1], SIGKILL);
  Event event = take();
  while (event.kind == Event::Kind::kBatch) event = take();
  EXPECT_EQ(event.kind, Event::Kind::kWorkerLost);
  EXPECT_EQ(event.worker_id, 1u);
  expect_worker_ends(1, "signal 9");
}

TEST_F(WholeStreamTest, WhereAnyWorkerMayMakeABatchTheDeathOfOneCostsNothing) {
  start_stream({.worker_count = 2, .prefetch_factor = 2, .slab_count = 32, .shard_count = 1, .any_worker = true},
               {.is_seeded_by_batch = true});
  // So many that the other worker is not done with them before the death is seen, on a busy machine either.
  std::vector<Indices> batches{{1}, {2}, {3}, {test::kStall}};
  while (batches.size() < 300) batches.push_back({static_cast<int64_t>(batches.size())});
  begin_listed(batches);
  std::vector<uint64_t> sequences;
  bool is_told = false;
  for (;;) {
    const Event event = take();
    if (event.kind == Event::Kind::kBatch) {
      sequences.push_back(event.batch->record().facts().sequence);
      expect_right(*event.batch);
      // The worker that stalls answers, and never comes back.
      if (sequences.size() == 4) ::kill(worker_pids_[event.worker_id], SIGKILL);
      continue;
    }
    if (event.kind != Event::Kind::kWorkerGone) {
      EXPECT_EQ(event.kind, Event::Kind::kEnd) << event.message();
      break;
    }
    is_told = true;
    expect_worker_ends(event.worker_id, "signal 9");
  }
  EXPECT_EQ(sequences, counting(300));
  EXPECT_TRUE(is_told);
}

TEST_F(WholeStreamTest, ABatchThatRaisesIsAnErrorInItsPlace) {
  start_stream({.worker_count = 2});
  begin_listed({{1}, {test::kRaise}, {2}});
  std::vector<bool> raises;
  for (Event event = take(); event.kind == Event::Kind::kBatch; event = take())
    raises.push_back(event.batch->record().raises());
  EXPECT_EQ(raises, (std::vector<bool>{false, true, false}));
  EXPECT_EQ(stream_->progress()->answered_count(), 3u);
  EXPECT_EQ(stream_->progress()->yielded_count(), 2u);
}

TEST_F(WholeStreamTest, TheEndOfAShardBringsTheStateOfItsDataset) {
  start_stream({.worker_count = 2, .keep_workers = true}, {.is_iterable = true});
  auto progress = std::make_shared<EpochProgress>(2);
  begin_listed({{1}, {2}, {test::kEnd}, {3}, {test::kEnd}, {test::kEnd}, {test::kEnd}}, {.progress = progress});
  Event event = take();
  while (event.kind == Event::Kind::kBatch || event.kind == Event::Kind::kShardEnded) event = take();
  EXPECT_EQ(event.kind, Event::Kind::kEnd) << event.message();
  for (uint32_t shard_id = 0; shard_id < 2; ++shard_id) {
    const auto& state = progress->shard_state(shard_id);
    const std::string text(reinterpret_cast<const char*>(state.data()), state.size());
    EXPECT_EQ(text, "shard " + std::to_string(shard_id) + " has ended");
  }
}

TEST_F(WholeStreamTest, WhatWasLookedAtComesInItsPlaceAndNothingIsAskedForBefore) {
  start_stream({.worker_count = 2, .prefetch_factor = 2});
  begin(shuffled(200, seed()));
  const auto deadline = steady_clock::now() + seconds(30);
  while (stream_->ahead().size() < 3) {
    const Event event = stream_->try_look_ahead(3);
    ASSERT_TRUE(event.kind == Event::Kind::kBatch || client_->wait_until(deadline));
  }
  EXPECT_EQ(client_->undelivered_count(), 1u) << "four were asked for, and three of them are here";
  EXPECT_EQ(client_->counters().batches.value(), 0u);
  for (size_t place = 0; place < 3; ++place) EXPECT_EQ(stream_->ahead()[place].batch->record().facts().sequence, place);
  EXPECT_EQ(finish(), counting(20));
}

TEST_F(WholeStreamTest, TheNextEpochIsBegunEarlyAndGoesOnWithWhatHasCome) {
  for (const int64_t sample_count : {1000, 1003, 25, 7}) {
    start_stream({.worker_count = 2, .keep_workers = true}, {.may_begin_early = true});
    const auto sampler = shuffled(sample_count, 3);  // every epoch draws from the one generator
    for (int64_t epoch = 0; epoch < 6; ++epoch) {
      begin(sampler, {.seeds = {.base_seed = 7, .epoch = epoch}});
      EXPECT_EQ(finish(), counting(batches_.size()));
    }
    EXPECT_EQ(client_->counters().early_batches.value(), 5 * std::min<uint64_t>(4, batches_.size()));
    EXPECT_EQ(client_->counters().stale_batches.value(), 0u);
    TearDown();
  }
}

TEST_F(WholeStreamTest, AnEpochThatWasBegunEarlyInVainLeavesNothingAndItsGeneratorAsItWas) {
  start_stream({.worker_count = 2, .keep_workers = true}, {.may_begin_early = true});
  for (uint64_t round = 0; round < 4; ++round) {
    auto sampler = shuffled(200, round);
    begin(sampler);
    EXPECT_EQ(finish(), counting(20));
    auto plain = shuffled(200, round);
    TorchSampler expected(plain);
    while (expected.next_integers()) {
    }
    EXPECT_TRUE(at::equal(sampler.generator->get_state(), plain.generator->get_state()));
    if (round == 0) ++epoch_;  // the number of the one in vain; later ones are expected and not begun
  }
  EXPECT_EQ(client_->counters().early_batches.value(), 0u);
}

TEST_F(WholeStreamTest, EpochsThatWereLeftHalfwayLeaveNothingBehind) {
  start_stream({.worker_count = 2});
  for (int epoch = 0; epoch < 8; ++epoch) {
    begin(shuffled(400, static_cast<uint64_t>(epoch)));
    const int count = draw(0, 39);
    for (int given = 0; given < count; ++given) {
      const Event event = take();
      ASSERT_EQ(event.kind, Event::Kind::kBatch);
      expect_right(*event.batch);
    }
  }
}

// The epoch ended there, and its state said that it was finished.
TEST_F(WholeStreamTest, WorkerThatEndsAShardOfAMapStyleDatasetIsAFailureAndNoEndOfTheEpoch) {
  start_stream({.worker_count = 1, .prefetch_factor = 2, .keep_workers = true});
  begin_listed({{1}, {test::kEnd}, {2}, {3}});
  ASSERT_EQ(take().kind, Event::Kind::kBatch);
  for (int count = 0; count < 2; ++count) {
    const Event event = take();
    ASSERT_EQ(event.kind, Event::Kind::kFailed);
    EXPECT_NE(event.message().find(count == 0 ? "has no shards" : "the epoch ends here, but only 1 of the"),
              std::string_view::npos)
        << event.message();
  }
  EXPECT_FALSE(stream_->progress()->is_finished());
}

}  // namespace
}  // namespace penstock::loader
