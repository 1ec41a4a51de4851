// SPDX-License-Identifier: Apache-2.0
#include "session/dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace penstock::session {
namespace {

using std::chrono::milliseconds;

class DispatchTest : public testing::Test {
 protected:
  using Kind = Dispatch::Command::Kind;

  static wire::BatchKey batch(uint64_t sequence) { return {.epoch = 1, .sequence = sequence}; }

  void join(WorkerSlot worker, uint64_t credit_bytes = 1'000'000) {
    dispatch_.add_worker(worker, credit_bytes, now_);
    collect();
  }
  void ask(uint64_t sequence, wire::Lane lane = wire::kNoLane) {
    dispatch_.ask(batch(sequence), lane, now_);
    collect();
  }
  bool answer(WorkerSlot worker, uint64_t sequence, uint64_t bytes = 100) {
    const bool counts = dispatch_.answered(worker, batch(sequence), bytes, now_);
    collect();
    return counts;
  }
  // Has the worker answer a request a while after it was asked.
  bool answer_after(Duration time, WorkerSlot worker, uint64_t sequence) {
    now_ += time;
    return answer(worker, sequence);
  }
  void lose(WorkerSlot worker, Loss loss = Loss::kDied) {
    dispatch_.lose_worker(worker, loss, now_);
    collect();
  }
  void tick() {
    dispatch_.tick(now_);
    collect();
  }

  void collect() {
    for (const auto& command : dispatch_.take_commands()) {
      commands_.push_back(command);
      if (command.kind == Kind::kSendRequest) requested_.push_back({command.worker, command.key.sequence});
    }
  }
  // The requests to each worker since this was last called.
  std::vector<std::pair<WorkerSlot, uint64_t>> asked() { return std::exchange(requested_, {}); }
  size_t count(Kind kind) const {
    return std::count_if(commands_.begin(), commands_.end(), [&](const auto& c) { return c.kind == kind; });
  }

  using Asked = std::vector<std::pair<WorkerSlot, uint64_t>>;
  Dispatch dispatch_{{.depth_max = 2}};
  Instant now_{};
  std::vector<Dispatch::Command> commands_;
  Asked requested_;
};

TEST_F(DispatchTest, RequestsWaitForAWorkerAndGoOutInOrder) {
  ask(1);
  ask(0);
  EXPECT_EQ(dispatch_.waiting_count(), 2u);
  join(7);
  EXPECT_EQ(asked(), (Asked{{7, 0}}));  // one alone until it is known how large a batch is
  EXPECT_TRUE(answer(7, 0));
  EXPECT_EQ(asked(), (Asked{{7, 1}}));
}

TEST_F(DispatchTest, CreditBoundsWhatAWorkerIsAskedForByTheLargestBatch) {
  join(1, /*credit_bytes=*/250);
  ask(0);
  EXPECT_TRUE(answer(1, 0, /*bytes=*/100));
  ask(1);
  ask(2);
  EXPECT_EQ(asked(), (Asked{{1, 0}, {1, 1}, {1, 2}}));
  EXPECT_TRUE(answer(1, 1, /*bytes=*/200));
  ask(3);
  EXPECT_EQ(dispatch_.waiting_count(), 1u);  // two of 200 are more than 250
  EXPECT_TRUE(answer(1, 2, 10));
  EXPECT_EQ(dispatch_.outstanding(1).size(), 1u);
}

TEST_F(DispatchTest, TheWorkerThatWillAnswerSoonestIsAsked) {
  join(1);
  join(2);
  ask(0);
  ask(1);
  EXPECT_EQ(asked(), (Asked{{1, 0}, {2, 1}}));
  EXPECT_TRUE(answer_after(milliseconds(10), 1, 0));
  EXPECT_TRUE(answer_after(milliseconds(90), 2, 1));
  ask(2);
  ask(3);
  EXPECT_EQ(asked(), (Asked{{1, 2}, {1, 3}}));  // two of 10 ms are there before one of 100
  ask(4);
  EXPECT_EQ(asked(), (Asked{{2, 4}}));
}

TEST_F(DispatchTest, WorkerWhoseBatchesAreSoonMadeHasMoreRequestsAtOnce) {
  for (const auto time : {milliseconds(1), milliseconds(6)}) {
    dispatch_ = Dispatch({.depth_max = 2, .quick_depth_max = 4});
    join(1);
    for (uint64_t sequence = 0; sequence < 8; ++sequence) ask(sequence);
    ASSERT_TRUE(answer_after(time, 1, 0));
    EXPECT_EQ(dispatch_.outstanding(1).size(), time < kQuickBatch ? 4u : 2u);
  }
}

// Behind a batch that turns out to be slow, the others of its worker wait.
TEST_F(DispatchTest, RequestsAheadTakeNoMoreThanTheirTime) {
  const auto count_at = [this](Duration time) {
    dispatch_ = Dispatch({.depth_max = 64, .request_ahead_below = milliseconds(5)});
    asked();
    join(1);
    ask(0);
    answer_after(time, 1, 0);
    asked();
    for (uint64_t sequence = 1; sequence <= 100; ++sequence) ask(sequence);
    return asked().size();
  };
  EXPECT_EQ(count_at(milliseconds(6)), 1u);
  EXPECT_EQ(count_at(milliseconds(2)), 3u);
  EXPECT_EQ(count_at(milliseconds(1)), 5u);
  EXPECT_EQ(count_at(std::chrono::microseconds(10)), 64u);
}

TEST_F(DispatchTest, WhatALostWorkerOwedIsAskedOfOthers) {
  join(1);
  ask(0);
  EXPECT_TRUE(answer(1, 0));
  ask(1);
  ask(2);
  join(2);
  asked();
  lose(1, Loss::kSilent);
  EXPECT_EQ(asked(), (Asked{{2, 1}, {2, 2}}));
  EXPECT_FALSE(answer(1, 1));  // a late answer of the one that was lost
  EXPECT_TRUE(answer(2, 1));
  EXPECT_FALSE(answer(2, 1));
  EXPECT_EQ(dispatch_.reissue_count(), 2u);
}

TEST_F(DispatchTest, AWorkerAnswersOnlyWhatItWasAskedFor) {
  join(1);
  join(2);
  ask(0);
  EXPECT_FALSE(answer(2, 0));
  EXPECT_TRUE(dispatch_.is_unanswered(batch(0)));
  EXPECT_TRUE(answer(1, 0));
}

class LateRequests : public DispatchTest {
 protected:
  LateRequests() {
    join(1);
    for (uint64_t sequence = 0; sequence < 16; ++sequence) {
      ask(sequence);
      EXPECT_TRUE(answer_after(milliseconds(100), 1, sequence));
    }
    join(2);
    commands_.clear();
    ask(16);
    ask(17);
    asked();
    EXPECT_TRUE(answer_after(milliseconds(100), 2, 17));
    now_ -= milliseconds(100);
  }
};

TEST_F(LateRequests, AreAskedOfASecondIdleWorkerAndTheFirstAnswerWins) {
  now_ += milliseconds(199);
  tick();
  EXPECT_EQ(asked(), (Asked{}));
  EXPECT_EQ(dispatch_.next_tick(), now_ + milliseconds(1));
  now_ += milliseconds(1);
  tick();
  EXPECT_EQ(asked(), (Asked{{2, 16}}));
  EXPECT_EQ(dispatch_.next_tick(), std::nullopt);
  EXPECT_TRUE(answer(2, 16));
  EXPECT_EQ(count(Kind::kCancel), 1u);
  EXPECT_FALSE(answer(1, 16));
  EXPECT_EQ(dispatch_.hedge_count(), 1u);
}

TEST_F(LateRequests, SurviveTheLossOfEitherWorker) {
  now_ += milliseconds(200);
  tick();
  asked();
  lose(1);
  EXPECT_EQ(asked(), (Asked{}));  // the other has it
  lose(2, Loss::kSilent);
  EXPECT_EQ(dispatch_.waiting_count(), 1u);
  join(3);
  EXPECT_EQ(asked(), (Asked{{3, 16}}));
}

TEST_F(LateRequests, StayWhereTheyAreWhileOthersWaitOrNoWorkerIsIdle) {
  ask(18);
  ask(19);
  ask(20);
  asked();
  now_ += milliseconds(500);
  tick();
  EXPECT_EQ(dispatch_.hedge_count(), 0u);
}

TEST_F(DispatchTest, AWorkerThatIsStuckInOneOfTheFirstBatchesHoldsUpNothing) {
  join(1);
  join(2);
  ask(0);
  ask(1);
  ASSERT_EQ(asked(), (Asked{{1, 0}, {2, 1}}));
  now_ += milliseconds(9'999);
  tick();
  EXPECT_EQ(asked(), (Asked{}));  // both are at work
  EXPECT_TRUE(answer(2, 1));
  EXPECT_EQ(dispatch_.next_tick(), now_ - milliseconds(9'999) + 5 * milliseconds(9'999));
  now_ += milliseconds(40'000);
  tick();
  EXPECT_EQ(asked(), (Asked{{2, 0}}));
  EXPECT_TRUE(answer(2, 0));
}

TEST_F(DispatchTest, AFirstBatchIsWaitedForTenSecondsAtLeast) {
  join(1);
  ask(0);
  EXPECT_TRUE(answer_after(milliseconds(100), 1, 0));
  ask(1);
  join(2);
  asked();
  now_ += milliseconds(9'999);
  tick();
  EXPECT_EQ(asked(), (Asked{}));
  now_ += milliseconds(1);
  tick();
  EXPECT_EQ(asked(), (Asked{{2, 1}}));
}

class PoisonTest : public DispatchTest {
 protected:
  PoisonTest() {
    join(1);
    ask(0);
    EXPECT_TRUE(answer(1, 0));
    ask(1);
    ask(2);
    dispatch_.started(1, batch(1));
    asked();
    lose(1);
  }
};

TEST_F(PoisonTest, BatchThatAWorkerDiedOfRunsAlone) {
  join(2);
  EXPECT_EQ(asked(), (Asked{{2, 1}}));  // and 2 waits, although there is room
  EXPECT_EQ(dispatch_.waiting_count(), 1u);
  EXPECT_TRUE(answer(2, 1));
  EXPECT_EQ(asked(), (Asked{{2, 2}}));
}

TEST_F(PoisonTest, BusyWorkerIsKeptFreeForItAsSoonAsItIsIdle) {
  join(2);
  EXPECT_TRUE(answer(2, 1));
  ask(3);
  dispatch_.started(2, batch(2));
  join(3);
  ask(4);
  EXPECT_EQ(asked(), (Asked{{2, 1}, {2, 2}, {2, 3}, {3, 4}}));
  lose(2);  // of 2, this time
  ask(5);
  EXPECT_EQ(asked(), (Asked{}));
  EXPECT_TRUE(answer(3, 4));
  EXPECT_EQ(asked(), (Asked{{3, 2}}));
  EXPECT_TRUE(answer(3, 2));
  EXPECT_EQ(asked(), (Asked{{3, 3}, {3, 5}}));
}

// A training stood still for ever: the worker that was kept free hung in what it had, and others were idle.
TEST_F(PoisonTest, IdleWorkerMakesItWhereTheOneThatIsKeptFreeHangs) {
  join(2);
  EXPECT_TRUE(answer(2, 1));
  ask(3);
  join(3);
  ask(4);
  EXPECT_EQ(asked(), (Asked{{2, 1}, {2, 2}, {2, 3}, {3, 4}}));
  dispatch_.started(3, batch(4));
  lose(3);  // and 2 is kept free for 4
  join(4);
  ask(5);
  EXPECT_EQ(asked(), (Asked{{4, 4}}));  // alone
  EXPECT_TRUE(answer(4, 4));
  EXPECT_EQ(asked(), (Asked{{4, 5}}));
}

// The same, where a worker died of a batch and the next one hung in it.
TEST_F(PoisonTest, BatchThatHangsIsAskedOfASecondWorkerLate) {
  join(2);
  EXPECT_TRUE(answer(2, 1));
  EXPECT_TRUE(answer(2, 2));
  ask(3);
  dispatch_.started(2, batch(3));
  lose(2);
  join(3);
  join(4);
  EXPECT_EQ(asked(), (Asked{{2, 1}, {2, 2}, {2, 3}, {3, 3}}));
  now_ += milliseconds(9'999);
  tick();
  EXPECT_EQ(asked(), (Asked{}));
  EXPECT_EQ(dispatch_.next_tick(), now_ + milliseconds(1));
  now_ += milliseconds(1);
  tick();
  EXPECT_EQ(asked(), (Asked{{4, 3}}));
  ask(4);
  EXPECT_EQ(asked(), (Asked{}));  // both are at it alone
  dispatch_.started(4, batch(3));
  lose(4);
  EXPECT_EQ(asked(), (Asked{}));
  EXPECT_EQ(count(Kind::kFail), 0u);
  EXPECT_TRUE(answer(3, 3));
  EXPECT_EQ(asked(), (Asked{{3, 4}}));
}

TEST_F(PoisonTest, ThreeDeathsFailIt) {
  for (const WorkerSlot worker : {2, 3}) {
    join(worker);
    dispatch_.started(worker, batch(1));
    EXPECT_EQ(count(Kind::kFail), 0u);
    lose(worker);
  }
  ASSERT_EQ(count(Kind::kFail), 1u);
  const auto failed = std::find_if(commands_.begin(), commands_.end(), [](auto& c) { return c.kind == Kind::kFail; });
  EXPECT_EQ(failed->key, batch(1));
  EXPECT_EQ(failed->death_count, 3u);
  join(4);
  EXPECT_EQ(asked().back(), (std::pair<WorkerSlot, uint64_t>{4, 2}));
  EXPECT_EQ(dispatch_.unanswered_count(), 1u);
}

TEST_F(PoisonTest, RequestThatMostDiedOfIsNamedUntilItIsAnswered) {
  using Deaths = std::pair<wire::BatchKey, uint32_t>;
  EXPECT_EQ(dispatch_.deadliest(), (Deaths{batch(1), 1}));
  join(2);
  dispatch_.started(2, batch(1));
  lose(2);
  EXPECT_EQ(dispatch_.deadliest(), (Deaths{batch(1), 2}));
  join(3);
  EXPECT_TRUE(answer(3, 1));
  EXPECT_EQ(dispatch_.deadliest(), std::nullopt);
}

TEST_F(PoisonTest, DeathThatIsTakenBackDoesNotCount) {
  join(2);
  dispatch_.forgive(batch(0), now_);  // answered long ago
  dispatch_.forgive(batch(1), now_);
  collect();
  EXPECT_EQ(asked(), (Asked{{2, 1}, {2, 2}}));  // not alone any more
  for (const WorkerSlot worker : {3, 4}) {
    lose(worker - 1);
    join(worker);
    dispatch_.started(worker, batch(1));
  }
  EXPECT_EQ(count(Kind::kFail), 0u);
}

TEST_F(PoisonTest, DeathsBeforeTheBatchWasBegunAndSilenceDoNotCount) {
  for (const WorkerSlot worker : {2, 3, 4, 5}) {
    join(worker);
    lose(worker);
  }
  for (const WorkerSlot worker : {6, 7, 8, 9}) {
    join(worker);
    dispatch_.started(worker, batch(1));
    lose(worker, Loss::kSilent);
  }
  EXPECT_EQ(count(Kind::kFail), 0u);
}

TEST_F(DispatchTest, DrainedWorkerFinishesWhatItBeganAndNothingElse) {
  join(1);
  ask(0);
  EXPECT_TRUE(answer(1, 0));
  ask(1);
  ask(2);
  dispatch_.started(1, batch(1));
  join(2);
  asked();
  dispatch_.drain_worker(1, now_);
  collect();
  EXPECT_EQ(asked(), (Asked{{2, 2}}));
  EXPECT_EQ(count(Kind::kCancel), 1u);
  EXPECT_EQ(count(Kind::kIdle), 0u);
  EXPECT_TRUE(answer(1, 1));
  EXPECT_EQ(count(Kind::kIdle), 1u);
  ask(3);
  EXPECT_EQ(asked(), (Asked{{2, 3}}));
}

TEST_F(DispatchTest, BatchThatALeavingWorkerHandsBackIsAskedOfAnother) {
  join(1);
  ask(0);
  dispatch_.started(1, batch(0));
  join(2);
  asked();
  dispatch_.drain_worker(1, now_);
  collect();
  EXPECT_EQ(asked(), (Asked{}));
  dispatch_.handed_back(1, batch(0), now_);
  collect();
  EXPECT_EQ(asked(), (Asked{{2, 0}}));
  EXPECT_EQ(count(Kind::kIdle), 1u);
  lose(1);
  EXPECT_EQ(dispatch_.deadliest(), std::nullopt);
}

class LaneTest : public DispatchTest {
 protected:
  LaneTest() {
    join(1);
    join(2);
    ask(0, 1);
    ask(1, 2);
    EXPECT_TRUE(answer(1, 0));
    EXPECT_TRUE(answer(2, 1));
    ask(2, 1);
    ask(3, 2);
    ask(4, 1);
    ask(5, 2);
  }
  std::vector<bool> starts() const {
    std::vector<bool> result;
    for (const auto& command : commands_)
      if (command.kind == Kind::kSendRequest) result.push_back(command.is_lane_start);
    return result;
  }
};

TEST_F(LaneTest, OneWorkerMakesAllBatchesOfALane) {
  EXPECT_EQ(asked(), (Asked{{1, 0}, {2, 1}, {1, 2}, {2, 3}, {1, 4}, {2, 5}}));
  EXPECT_EQ(starts(), (std::vector<bool>{true, true, false, false, false, false}));
}

TEST_F(LaneTest, LaneOfALostWorkerGoesOnElsewhereInOrder) {
  asked();
  commands_.clear();
  EXPECT_TRUE(answer(2, 3));
  lose(1, Loss::kSilent);
  EXPECT_EQ(asked(), (Asked{{2, 2}}));
  EXPECT_EQ(starts(), (std::vector<bool>{true}));
  EXPECT_TRUE(answer(2, 5));
  EXPECT_EQ(asked(), (Asked{{2, 4}}));
  EXPECT_EQ(starts(), (std::vector<bool>{true, false}));
}

TEST_F(LaneTest, DrainedWorkerGivesItsLanesAwayOnceItOwesNothing) {
  dispatch_.started(1, batch(2));
  asked();
  EXPECT_TRUE(answer(2, 3));
  dispatch_.drain_worker(1, now_);
  collect();
  EXPECT_EQ(asked(), (Asked{}));  // requests that follow 2 have to wait for it
  EXPECT_TRUE(answer(1, 2));
  EXPECT_EQ(asked(), (Asked{{2, 4}}));
  EXPECT_TRUE(commands_.back().is_lane_start);
}

TEST_F(LaneTest, EndOfALaneForgetsWhatWasAskedOfIt) {
  asked();
  EXPECT_TRUE(answer(1, 2));
  dispatch_.end_lane(1, 1, now_);
  collect();
  EXPECT_EQ(count(Kind::kCancel), 1u);
  EXPECT_EQ(dispatch_.unanswered_count(), 2u);
  EXPECT_FALSE(answer(1, 4));
}

TEST_F(DispatchTest, ForgottenRequestIsCancelledAndItsAnswerDropped) {
  join(1);
  ask(0);
  dispatch_.forget(batch(0), now_);
  collect();
  EXPECT_EQ(count(Kind::kCancel), 1u);
  EXPECT_FALSE(answer(1, 0));
  EXPECT_EQ(dispatch_.unanswered_count(), 0u);
}

// ---- Recalls

TEST_F(DispatchTest, RecallGoesFirstAndToTheWorkerThatMadeTheBatch) {
  join(1);
  join(2);
  ask(0);
  answer(1, 0);
  asked();
  for (uint64_t sequence = 1; sequence <= 6; ++sequence) ask(sequence);
  asked();
  const wire::BatchKey recall = wire::recall_of(batch(0));
  dispatch_.ask(recall, wire::kNoLane, now_, nullptr, 2);
  collect();
  EXPECT_EQ(asked(), (Asked{{2, recall.sequence}}));  // beyond its depth
  EXPECT_TRUE(answer(2, recall.sequence));
  EXPECT_FALSE(dispatch_.is_unanswered(recall));
}

TEST_F(DispatchTest, RecallIsAskedOfAnotherWorkerWhenTheFirstIsLost) {
  join(1);
  join(2);
  const wire::BatchKey recall = wire::recall_of(batch(0));
  dispatch_.ask(recall, wire::kNoLane, now_, nullptr, 1);
  collect();
  EXPECT_EQ(asked(), (Asked{{1, recall.sequence}}));
  lose(1, Loss::kSilent);
  EXPECT_EQ(asked(), (Asked{{2, recall.sequence}}));
  EXPECT_TRUE(answer(2, recall.sequence));
}

TEST_F(DispatchTest, RecallOfAnEarlierEpochOutlivesIt) {
  const wire::BatchKey recall = wire::recall_of(batch(3));
  dispatch_.ask(recall, wire::kNoLane, now_, nullptr, 7);  // a worker that is gone
  ask(4);
  dispatch_.forget_other_epochs(2, now_);
  collect();
  EXPECT_FALSE(dispatch_.is_unanswered(batch(4)));
  EXPECT_TRUE(dispatch_.is_unanswered(recall));
  join(1);
  EXPECT_EQ(asked(), (Asked{{1, recall.sequence}}));
  dispatch_.forget(recall, now_);
  collect();
  EXPECT_EQ(count(Kind::kCancel), 1u);
  EXPECT_EQ(dispatch_.unanswered_count(), 0u);
}

}  // namespace
}  // namespace penstock::session
