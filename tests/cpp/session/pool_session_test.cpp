// SPDX-License-Identifier: Apache-2.0
// The trainer's half against workers' sessions: its messages, and the answers that count.
#include "session/pool_session.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "session/worker_session.h"

namespace penstock::session {
namespace {

using std::chrono::milliseconds;
using In = wire::ToWorker::Kind;

class PoolSessionTest : public testing::Test {
 protected:
  using Kind = PoolSession::Command::Kind;

  static wire::BatchKey batch(uint64_t sequence) { return {.epoch = 1, .sequence = sequence}; }

  void roster(const std::vector<wire::RosterEntry>& entries) {
    session_.set_roster(entries, now_);
    exchange();
  }
  void ask(uint64_t sequence) {
    session_.ask(batch(sequence), wire::kNoLane, now_);
    exchange();
  }
  // Has every worker answer its requests, in turns, until nothing moves any more.
  void work() {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (auto& [id, worker] : worker_sessions_) {
        if (!worker.begin()) continue;
        worker.finished();
        has_moved = true;
      }
      exchange();
    }
  }
  // Carries messages to and fro, but for workers that are cut off.
  void exchange() {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (const auto& command : session_.take_commands()) {
        commands_.push_back(command);
        if (command.kind != Kind::kSend || is_cut_[command.worker_id]) continue;
        worker_sessions_[command.worker_id].receive(command.message, now_);
        has_moved = true;
      }
      for (auto& [id, worker] : worker_sessions_) {
        for (const auto& command : worker.take_commands()) {
          if (command.kind != WorkerSession::Command::Kind::kSend || is_cut_[id]) continue;
          deliver(id, command.message);
          has_moved = true;
        }
      }
    }
  }
  void deliver(uint64_t worker_id, const wire::ToTrainer& message) {
    if (session_.receive(worker_id, message, 100, now_)) taken_.push_back(message.key.sequence);
  }
  void pass(Duration time) {
    now_ += time;
    session_.tick(now_);
    exchange();
  }
  // The number of the link that the worker was greeted on last, and how often it was greeted.
  uint32_t last_link(uint64_t worker_id) const {
    uint32_t number = 0;
    for (const auto& command : commands_)
      if (command.worker_id == worker_id && command.message.kind == In::kHello) number = command.message.link;
    return number;
  }
  size_t hello_count() const {
    return static_cast<size_t>(std::count_if(commands_.begin(), commands_.end(), [](const auto& command) {
      return command.kind == Kind::kSend && command.message.kind == In::kHello;
    }));
  }
  // The worker says that its link is broken.
  void break_link(uint64_t worker_id) {
    deliver(worker_id, {.kind = wire::ToTrainer::Kind::kBroken, .link = last_link(worker_id)});
    exchange();
  }
  // The goodbyes that were sent: to whom, and whether the trainer may come back.
  std::vector<std::pair<uint64_t, bool>> goodbyes() const {
    std::vector<std::pair<uint64_t, bool>> goodbyes;
    for (const auto& command : commands_)
      if (command.kind == Kind::kSend && command.message.kind == In::kBye)
        goodbyes.emplace_back(command.worker_id, command.message.is_continued);
    return goodbyes;
  }
  // The workers to which a connection rests, each with a goodbye for good.
  std::vector<uint64_t> rests() const {
    std::vector<uint64_t> rests;
    for (const auto& command : commands_) {
      if (command.kind != Kind::kDisconnect || !command.rests) continue;
      EXPECT_EQ(command.message.kind, In::kBye);
      EXPECT_FALSE(command.message.is_continued);
      rests.push_back(command.worker_id);
    }
    return rests;
  }
  std::vector<uint64_t> taken() { return std::exchange(taken_, {}); }
  size_t count(Kind kind) const {
    return static_cast<size_t>(
        std::count_if(commands_.begin(), commands_.end(), [&](const auto& c) { return c.kind == kind; }));
  }

  PoolSession session_{{.trainer_id = 9, .credit_bytes = 1000}};
  std::map<uint64_t, WorkerSession> worker_sessions_;
  std::map<uint64_t, bool> is_cut_;
  Instant now_{};
  std::vector<PoolSession::Command> commands_;
  std::vector<uint64_t> taken_;
};

TEST_F(PoolSessionTest, EveryBatchIsTakenOnce) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  EXPECT_EQ(session_.open_count(), 2u);
  for (uint64_t sequence = 0; sequence < 6; ++sequence) ask(sequence);
  work();
  auto all = taken();
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, (std::vector<uint64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_TRUE(worker_sessions_[1].is_empty());
  EXPECT_TRUE(worker_sessions_[2].is_empty());
}

TEST_F(PoolSessionTest, SilentConnectionIsMadeAnewEachTimeAfterTwiceAsLong) {
  roster({{.worker_id = 1, .incarnation = 1}});
  pass(kPingInterval);
  is_cut_[1] = true;
  std::vector<Duration> renewed_after;
  const Instant cut_at = now_;
  while (now_ - cut_at < std::chrono::seconds(15)) {
    const size_t before = count(Kind::kRenew);
    pass(kPingInterval);
    if (count(Kind::kRenew) > before) renewed_after.push_back(now_ - cut_at);
  }
  EXPECT_EQ(renewed_after, (std::vector<Duration>{kRenewAfter, 3 * kRenewAfter, 7 * kRenewAfter}));
  session_.connected(1, now_);
  is_cut_[1] = false;
  exchange();
  EXPECT_EQ(session_.open_count(), 1u);
  const size_t before = count(Kind::kRenew);
  for (int i = 0; i < 20; ++i) pass(kPingInterval);  // pongs are heard
  EXPECT_EQ(count(Kind::kRenew), before);
}

TEST_F(PoolSessionTest, SilentWorkerIsGivenUpAfterALeaseAndItsAnswersAreRefused) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  is_cut_[1] = true;
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  for (int i = 0; i < 3; ++i) {
    pass(kPingInterval);
    deliver(2, {});  // nothing that counts, of nobody's link
  }
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(session_.dispatch().reissue_count(), 1u);
  // The first worker made it all the same, on a link that has ended.
  deliver(1, {.kind = wire::ToTrainer::Kind::kAnswer, .link = 1, .stamp = 3, .key = batch(0)});
  EXPECT_TRUE(taken().empty());
}

// A trainer whose I/O thread widened a batch for 1.6 s lost all of its workers, and did so again at the next one.
TEST_F(PoolSessionTest, TrainerThatWasHeldUpLosesNoWorker) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  ask(0);
  for (int i = 0; i < 5; ++i) pass(2 * kLease);  // each worker answers the ping that comes late
  EXPECT_EQ(session_.open_count(), 2u);
  EXPECT_EQ(hello_count(), 2u);
  EXPECT_EQ(session_.dispatch().reissue_count(), 0u);
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
}

TEST_F(PoolSessionTest, SilenceOfAWorkerCountsWhileTheTrainerIsNotHeldUp) {
  roster({{.worker_id = 1, .incarnation = 1}});
  is_cut_[1] = true;
  pass(2 * kLease);
  EXPECT_EQ(session_.open_count(), 1u);
  pass(kPingInterval);
  EXPECT_EQ(session_.open_count(), 1u);
  pass(kPingInterval);
  EXPECT_EQ(session_.open_count(), 0u);
}

// A worker that damaged each piece had the trainer agree on keys and connect as fast as messages cross.
TEST_F(PoolSessionTest, LinkThatDoesNotHoldIsMadeAnewEachTimeAfterTwiceAsLong) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  break_link(1);
  EXPECT_EQ(hello_count(), 2u);  // the first time at once
  Duration pause = kRemakePause;
  for (size_t count = 2; count <= 6; ++count) {  // the seventh in a row is the worker's fault
    break_link(1);
    EXPECT_EQ(session_.open_count(), 0u);
    pass(pause - Duration(1));
    EXPECT_EQ(hello_count(), count);
    pass(Duration(1));
    EXPECT_EQ(hello_count(), count + 1);
    pause = std::min(2 * pause, kRemakePauseMax);
  }
  // An answer that counts makes up for all of them.
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  const size_t before = hello_count();
  break_link(1);
  EXPECT_EQ(hello_count(), before + 1);
}

TEST_F(PoolSessionTest, OthersMakeWhatAWorkerOwesWhoseLinkDoesNotHold) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  break_link(1);
  break_link(1);
  EXPECT_EQ(session_.open_count(), 1u);
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(count(Kind::kFail), 0u);
}

TEST_F(PoolSessionTest, LostAnswerIsSentAgainOnTheNextLink) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  ASSERT_TRUE(worker_sessions_[1].begin());
  worker_sessions_[1].finished();
  worker_sessions_[1].take_commands();  // started and answer are lost
  pass(kPingInterval);                  // the pong shows it
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(session_.dispatch().reissue_count(), 0u);
}

// A trainer was given the first batch of a shard again, in the middle of it.
TEST_F(PoolSessionTest, LaneStartsAgainWhereTheWelcomeOfAWorkerThatForgotIsLost) {
  roster({{.worker_id = 1, .incarnation = 1}});
  session_.ask(batch(0), /*lane=*/1, now_);
  exchange();
  work();
  session_.ask(batch(1), /*lane=*/1, now_);
  worker_sessions_[1].abandon();
  const auto to_worker = [&] {
    for (const auto& command : session_.take_commands()) worker_sessions_[1].receive(command.message, now_);
    return worker_sessions_[1].take_commands();
  };
  for (const auto& command : to_worker()) deliver(1, command.message);  // broken
  EXPECT_TRUE(to_worker().front().message.is_fresh);                    // which does not arrive
  pass(kPingInterval);
  const auto begun = worker_sessions_[1].begin();
  ASSERT_TRUE(begun);
  EXPECT_EQ(begun->key, batch(1));
  EXPECT_TRUE(begun->is_lane_start);
}

TEST_F(PoolSessionTest, DeadWorkersRequestsGoElsewhereAtOnce) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  session_.died(1, now_);
  exchange();
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
}

// A stream failed with "3 workers died" after its connection to one worker had been reset three times.
TEST_F(PoolSessionTest, WorkerThatIsHeardAgainAfterItsConnectionEndedWasNotKilledByItsBatch) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(worker_sessions_[1].begin());
    exchange();  // it has begun
    session_.died(1, now_);
    pass(kPingInterval);
    worker_sessions_[1].finished();  // which nobody wants any more
    exchange();
  }
  EXPECT_EQ(count(Kind::kFail), 0u);
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
}

class LostProcesses : public PoolSessionTest {
 protected:
  // The process in which the worker makes its batches ends, while it makes one if it has any to make.
  void lose_process(uint64_t worker_id) {
    worker_sessions_[worker_id].begin();
    exchange();
    worker_sessions_[worker_id].lose_process(worker_sessions_[worker_id].trainer_id());
    exchange();
  }
  uint32_t death_count() const {
    const auto deadliest = session_.dispatch().deadliest();
    return deadliest ? deadliest->second : 0;
  }
};

TEST_F(LostProcesses, LeaveTheirWorkersToBeGreetedAgainWhileOthersMakeWhatTheyOwed) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  lose_process(1);
  EXPECT_EQ(session_.open_count(), 1u);
  EXPECT_EQ(worker_sessions_[2].queued_count(), 1u);
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  const size_t hellos = hello_count();
  pass(milliseconds(99));
  EXPECT_EQ(hello_count(), hellos);
  pass(milliseconds(1));
  EXPECT_EQ(hello_count(), hellos + 1);
  EXPECT_EQ(session_.open_count(), 2u);
  EXPECT_EQ(session_.dispatch().worker_count(), 2u);
  for (uint64_t sequence = 1; sequence < 5; ++sequence) ask(sequence);
  EXPECT_GT(worker_sessions_[1].queued_count(), 0u);
  work();
  EXPECT_EQ(taken().size(), 4u);
  EXPECT_EQ(count(Kind::kDisconnect), 0u);
}

TEST_F(LostProcesses, OfOneWorkerCountAsDeathsOfTheirBatchWhateverItWelcomes) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  for (uint32_t deaths = 1; deaths <= 3; ++deaths) {
    EXPECT_EQ(count(Kind::kFail), 0u);
    lose_process(1);
    EXPECT_EQ(session_.open_count(), 0u);
    pass(milliseconds(100));
    EXPECT_EQ(session_.open_count(), 1u);
    EXPECT_EQ(death_count(), deaths < 3 ? deaths : 0);
  }
  ASSERT_EQ(count(Kind::kFail), 1u);
  const auto failed = std::find_if(commands_.begin(), commands_.end(), [](auto& c) { return c.kind == Kind::kFail; });
  EXPECT_EQ(failed->key, batch(0));
  EXPECT_EQ(failed->death_count, 3u);
  EXPECT_EQ(count(Kind::kDistrust), 0u);
  ask(1);
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{1}));
}

TEST_F(LostProcesses, OfSeveralWorkersCountTogetherWithTheDeathsOfWorkers) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  lose_process(1);
  roster({{.worker_id = 2, .incarnation = 1}});
  lose_process(2);
  EXPECT_EQ(death_count(), 2u);
  roster({{.worker_id = 3, .incarnation = 1}});
  ASSERT_TRUE(worker_sessions_[3].begin());
  exchange();
  session_.died(3, now_);
  exchange();
  EXPECT_EQ(count(Kind::kFail), 1u);
}

TEST_F(LostProcesses, AreBlamedOnWhatTheyWereAtAlone) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  work();
  ask(1);
  ask(2);
  EXPECT_EQ(worker_sessions_[1].queued_count(), 2u);
  lose_process(1);
  ASSERT_TRUE(session_.dispatch().deadliest());
  EXPECT_EQ(session_.dispatch().deadliest()->first, batch(1));
  pass(milliseconds(100));
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0, 1, 2}));
  EXPECT_EQ(count(Kind::kFail), 0u);
}

TEST_F(LostProcesses, AreHeardOfAlsoWhereAMessageBeforeWasLost) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  ASSERT_TRUE(worker_sessions_[1].begin());
  worker_sessions_[1].take_commands();
  worker_sessions_[1].lose_process(worker_sessions_[1].trainer_id());
  exchange();
  EXPECT_EQ(death_count(), 1u);
  EXPECT_EQ(session_.open_count(), 0u);
  pass(milliseconds(100));
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
}

TEST_F(LostProcesses, AreDeathsAlsoWhereTheWorkerLeaves) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  ASSERT_TRUE(worker_sessions_[1].begin());
  worker_sessions_[1].drain();
  exchange();
  lose_process(1);
  EXPECT_EQ(death_count(), 1u);
}

TEST_F(LostProcesses, OfIdleWorkersAreNoDeathsAndTheirLanesStartAgain) {
  roster({{.worker_id = 1, .incarnation = 1}});
  session_.ask(batch(0), /*lane=*/1, now_);
  exchange();
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  lose_process(1);
  EXPECT_EQ(session_.open_count(), 1u) << "it is greeted at once";
  session_.ask(batch(1), /*lane=*/1, now_);
  exchange();
  const auto begun = worker_sessions_[1].begin();
  ASSERT_TRUE(begun);
  EXPECT_EQ(begun->key, batch(1));
  EXPECT_TRUE(begun->is_lane_start);
  EXPECT_EQ(death_count(), 0u);
}

TEST_F(LostProcesses, HaveTheirLanesStartAgain) {
  roster({{.worker_id = 1, .incarnation = 1}});
  session_.ask(batch(0), /*lane=*/1, now_);
  exchange();
  work();
  session_.ask(batch(1), /*lane=*/1, now_);
  exchange();
  lose_process(1);
  pass(milliseconds(100));
  const auto begun = worker_sessions_[1].begin();
  ASSERT_TRUE(begun);
  EXPECT_EQ(begun->key, batch(1));
  EXPECT_TRUE(begun->is_lane_start);
}

TEST_F(LostProcesses, OfABatchThatWasNotAskedForAreALie) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  deliver(1, {.kind = wire::ToTrainer::Kind::kDied, .link = last_link(1), .stamp = 2, .key = batch(7)});
  exchange();
  ASSERT_EQ(count(Kind::kDistrust), 1u);
  EXPECT_FALSE(session_.dispatch().is_unanswered(batch(7)));
}

TEST_F(LostProcesses, OnALinkThatHasEndedOrWithoutAStampCountForNoDeath) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  ask(0);
  break_link(1);
  deliver(1, {.kind = wire::ToTrainer::Kind::kDied, .link = 1, .stamp = 2, .key = batch(0)});
  EXPECT_EQ(death_count(), 0u);
  EXPECT_EQ(session_.open_count(), 2u);
  deliver(1, {.kind = wire::ToTrainer::Kind::kDied, .link = last_link(1), .key = batch(0)});
  exchange();
  EXPECT_EQ(count(Kind::kDistrust), 1u);
  EXPECT_EQ(death_count(), 0u);
}

// A worker was asked twice for batches of a shard, and made those behind them from too far on.
TEST_F(PoolSessionTest, WhatASilentWorkerOwedIsAskedOnceOfOneThatIsGreetedAtThatMoment) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  ask(0);
  work();
  ask(1);
  ask(2);
  is_cut_[1] = true;
  pass(kPingInterval);
  pass(kPingInterval);
  is_cut_[2] = true;
  deliver(2, {.link = 2, .stamp = 99});
  exchange();  // the hello is lost
  is_cut_[2] = false;
  commands_.clear();
  pass(kPingInterval);
  std::vector<uint64_t> asked;
  for (const auto& command : commands_)
    if (command.worker_id == 2 && command.message.kind == In::kRequest) asked.push_back(command.message.key.sequence);
  std::sort(asked.begin(), asked.end());
  EXPECT_EQ(asked, (std::vector<uint64_t>{1, 2}));
}

TEST_F(PoolSessionTest, FencedIncarnationIsNoLongerListenedTo) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  ASSERT_TRUE(worker_sessions_[1].begin());
  worker_sessions_[1].finished();
  const auto late = worker_sessions_[1].take_commands();
  session_.set_roster(std::vector<wire::RosterEntry>{{.worker_id = 1, .incarnation = 2}}, now_);
  for (const auto& command : late)
    if (command.kind == WorkerSession::Command::Kind::kSend) deliver(1, command.message);
  EXPECT_TRUE(taken().empty());
  EXPECT_EQ(count(Kind::kDisconnect), 0u);
  exchange();
  EXPECT_EQ(count(Kind::kDisconnect), 1u);
  EXPECT_EQ(count(Kind::kConnect), 2u);
}

TEST_F(PoolSessionTest, WithdrawnWorkerFinishesAndIsToldGoodbye) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  ASSERT_TRUE(worker_sessions_[1].begin());
  exchange();
  roster({{.worker_id = 1, .incarnation = 1, .is_withdrawn = true}});
  EXPECT_EQ(worker_sessions_[1].trainer_id(), 9u);
  worker_sessions_[1].finished();
  exchange();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(worker_sessions_[1].trainer_id(), 0u);
  EXPECT_EQ(session_.known_count(), 0u);
}

TEST_F(PoolSessionTest, GoodbyeSaysWhetherTheTrainerMayComeBack) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}, {.worker_id = 3, .incarnation = 1}});
  roster({{.worker_id = 1, .incarnation = 1, .is_withdrawn = true},
          {.worker_id = 2, .incarnation = 1},
          {.worker_id = 3, .incarnation = 1}});
  EXPECT_EQ(worker_sessions_[1].trainer_id(), 0u);
  EXPECT_EQ(goodbyes(), (std::vector<std::pair<uint64_t, bool>>{{1, true}}));
  worker_sessions_[2].drain();
  exchange();
  EXPECT_EQ(worker_sessions_[2].trainer_id(), 0u);
  EXPECT_EQ(goodbyes(), (std::vector<std::pair<uint64_t, bool>>{{1, true}, {2, true}}));
  session_.leave(now_);
  exchange();
  EXPECT_EQ(worker_sessions_[3].trainer_id(), 0u);
  EXPECT_EQ(goodbyes(), (std::vector<std::pair<uint64_t, bool>>{{1, true}, {2, true}, {3, false}}));
}

// A process of a job that was over ran on for five minutes: its worker served another trainer when this one ended, so
// it was told nothing.
TEST_F(PoolSessionTest, WorkerThatServesAnotherByNowIsToldGoodbyeForGood) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  worker_sessions_[1].assign(5, /*is_to_part=*/true);
  worker_sessions_[2].receive({.kind = In::kHello, .trainer_id = 5, .link = 1, .stamp = 1}, now_);
  exchange();
  pass(milliseconds(100));
  ASSERT_EQ(session_.open_count(), 1u);
  ASSERT_EQ(session_.known_count(), 2u);
  commands_.clear();
  session_.leave(now_);
  exchange();
  EXPECT_EQ(goodbyes(), (std::vector<std::pair<uint64_t, bool>>{{1, false}, {2, false}}));
  EXPECT_EQ(rests(), std::vector<uint64_t>{});
}

TEST_F(PoolSessionTest, ConnectionRestsToAWorkerThatMayKeepTheProcessOfTheJob) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  is_cut_[3] = true;
  roster({{.worker_id = 3, .incarnation = 1}, {.worker_id = 1, .incarnation = 2}});
  EXPECT_EQ(rests(), (std::vector<uint64_t>{2, 1})) << "it is not named, and it has another incarnation";
  roster({});
  EXPECT_EQ(rests(), (std::vector<uint64_t>{2, 1, 1})) << "worker 3 has never welcomed this trainer";
  EXPECT_EQ(goodbyes(), (std::vector<std::pair<uint64_t, bool>>{}));
}

TEST_F(PoolSessionTest, WorkerThatServesAnotherIsAskedAgainLater) {
  worker_sessions_[1].receive({.kind = In::kHello, .trainer_id = 5, .link = 1, .stamp = 1}, now_);
  worker_sessions_[1].take_commands();
  roster({{.worker_id = 1, .incarnation = 1}});
  EXPECT_EQ(session_.open_count(), 0u);
  ask(0);
  worker_sessions_[1].receive({.kind = In::kBye, .trainer_id = 5, .link = 1, .stamp = 2}, now_);
  ASSERT_TRUE(session_.next_tick());
  pass(*session_.next_tick() - now_);
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
}

TEST_F(PoolSessionTest, WorkerIsNotSilentWhileALargeBatchComesInPieces) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  ASSERT_TRUE(worker_sessions_[1].begin());
  worker_sessions_[1].finished();
  const auto late = worker_sessions_[1].take_commands();  // the pieces come before these, and pongs behind them
  is_cut_[1] = true;
  for (int i = 0; i < 10; ++i) {
    pass(kPingInterval);
    session_.heard(1, 1, now_);
  }
  EXPECT_EQ(session_.open_count(), 1u);
  for (const auto& command : late) deliver(1, command.message);
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(session_.dispatch().reissue_count(), 0u);
  // Those of a link that has ended say nothing.
  for (int i = 0; i < 3; ++i) {
    pass(kPingInterval);
    session_.heard(1, 0, now_);
  }
  EXPECT_EQ(session_.open_count(), 0u);
}

TEST_F(PoolSessionTest, RequestsOfWorkersThatDeclineGoElsewhereAndNoBatchIsBlamed) {
  const uint64_t declined_count = 2 * DispatchOptions{}.deaths_max;
  std::vector<wire::RosterEntry> workers;
  for (uint64_t id = 1; id <= declined_count; ++id) {
    workers.push_back({.worker_id = id, .incarnation = 1});
    roster(workers);
    if (id == 1) ask(0);
    ASSERT_TRUE(worker_sessions_[id].begin()) << id;
    worker_sessions_[id].decline();
    exchange();
    EXPECT_EQ(session_.declined_count(), id);
    EXPECT_EQ(session_.open_count(), 0u);
  }
  EXPECT_EQ(session_.known_count(), declined_count);
  workers.push_back({.worker_id = declined_count + 1, .incarnation = 1});
  roster(workers);
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(session_.dispatch().reissue_count(), declined_count);
  EXPECT_EQ(count(Kind::kFail), 0u);
}

TEST_F(PoolSessionTest, WorkerThatDeclinesIsNotGreetedAgain) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  worker_sessions_[1].decline();
  exchange();
  commands_.clear();
  for (int i = 0; i < 10; ++i) pass(kLease);
  roster({{.worker_id = 1, .incarnation = 1}});
  EXPECT_TRUE(commands_.empty());
  // Nothing is due before there is somebody else to ask.
  EXPECT_EQ(session_.next_tick(), std::nullopt);
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
}

TEST_F(PoolSessionTest, WorkerThatDeclinedWhileItWasCutOffSaysItAgain) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  is_cut_[1] = true;
  worker_sessions_[1].decline();
  exchange();
  EXPECT_EQ(session_.declined_count(), 0u);
  is_cut_[1] = false;
  pass(kPingInterval);  // the worker knows nothing of the ping's link, and is greeted
  EXPECT_EQ(session_.declined_count(), 1u);
}

TEST_F(PoolSessionTest, DeclineOnALinkThatHasEndedIsNotHeard) {
  roster({{.worker_id = 1, .incarnation = 1}});
  deliver(1, {.kind = wire::ToTrainer::Kind::kBroken, .link = 1});
  exchange();
  deliver(1, {.kind = wire::ToTrainer::Kind::kDeclined, .link = 1});
  EXPECT_EQ(session_.declined_count(), 0u);
  EXPECT_EQ(session_.open_count(), 1u);
}

TEST_F(PoolSessionTest, DecliningWorkerThatIsGoneOrBeganAnewIsForgotten) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  worker_sessions_[1].decline();
  worker_sessions_[2].decline();
  exchange();
  EXPECT_EQ(session_.declined_count(), 2u);
  worker_sessions_[1] = {};  // a process that can do more
  roster({{.worker_id = 1, .incarnation = 2}});
  EXPECT_EQ(session_.known_count(), 1u);
  EXPECT_EQ(session_.declined_count(), 0u);
  ask(0);
  work();
  EXPECT_EQ(taken(), (std::vector<uint64_t>{0}));
}

TEST_F(PoolSessionTest, DecliningWorkerThatIsWithdrawnIsPartedFrom) {
  roster({{.worker_id = 1, .incarnation = 1}});
  worker_sessions_[1].decline();
  exchange();
  roster({{.worker_id = 1, .incarnation = 1, .is_withdrawn = true}});
  EXPECT_EQ(session_.known_count(), 0u);
  EXPECT_EQ(session_.declined_count(), 0u);
  EXPECT_EQ(count(Kind::kDisconnect), 1u);
}

// An end of a shard in the place of a batch ended the epoch.
TEST_F(PoolSessionTest, RequestThatWorkersAnswerWronglyFailsAfterAsManyAsDieOfIt) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  for (int count = 0; count < 3; ++count) {
    EXPECT_EQ(this->count(Kind::kFail), 0u);
    session_.distrust(1, batch(0), "it lies", now_);
    exchange();
    EXPECT_EQ(session_.open_count(), 0u);
    pass(milliseconds(100));
    EXPECT_EQ(session_.open_count(), 1u) << "it is greeted again";
  }
  ASSERT_EQ(count(Kind::kFail), 1u);
  EXPECT_EQ(count(Kind::kDistrust), 3u);
  const auto told = std::find_if(commands_.begin(), commands_.end(), [](auto& c) { return c.kind == Kind::kDistrust; });
  EXPECT_EQ(told->asked, batch(0));
  EXPECT_EQ(told->reason, "it lies");
  ask(1);
  work();
  EXPECT_EQ(taken(), std::vector<uint64_t>{1});
}

TEST_F(PoolSessionTest, WhatAWorkerThatLiesOwedIsAskedOfOthers) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  ask(0);
  ask(1);
  for (uint64_t worker_id : {1, 2}) EXPECT_EQ(worker_sessions_[worker_id].queued_count(), 1u);
  session_.distrust(1, std::nullopt, "it lies", now_);
  exchange();
  work();
  auto all = taken();
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, (std::vector<uint64_t>{0, 1}));
  EXPECT_EQ(count(Kind::kFail), 0u);
}

// The third wrong answer ended the training, whoever else was there to make the batch.
TEST_F(PoolSessionTest, WorkersThatLieAreDismissedOneAfterTheOtherWhileAnotherIsThere) {
  std::vector<wire::RosterEntry> entries;
  for (uint64_t id = 1; id <= 5; ++id) entries.push_back({.worker_id = id, .incarnation = 1});
  roster(entries);
  for (uint64_t sequence = 0; sequence < 5; ++sequence) ask(sequence);
  for (uint64_t liar = 1; liar <= 4; ++liar) {
    EXPECT_TRUE(session_.distrust(liar, batch(0), "it lies", now_));
    exchange();
    EXPECT_EQ(session_.known_count(), 5 - liar);
  }
  EXPECT_EQ(count(Kind::kDistrust), 4u);
  EXPECT_EQ(count(Kind::kDisconnect), 4u);
  for (const auto& command : commands_) {
    if (command.kind != Kind::kDistrust) continue;
    EXPECT_TRUE(command.is_dismissed);
    EXPECT_FALSE(command.asked) << "no request counts a death";
  }
  work();
  auto all = taken();
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, (std::vector<uint64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(count(Kind::kFail), 0u);
}

TEST_F(PoolSessionTest, DismissedWorkerStaysSoWhateverItsIncarnation) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  EXPECT_TRUE(session_.distrust(1, std::nullopt, "it lies", now_));
  exchange();
  const size_t hellos = hello_count();
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  roster({{.worker_id = 2, .incarnation = 1}});
  roster({{.worker_id = 1, .incarnation = 2}, {.worker_id = 2, .incarnation = 1}});
  pass(kRemakePauseMax);
  EXPECT_EQ(hello_count(), hellos);
  EXPECT_EQ(session_.known_count(), 1u);
  deliver(1, {.kind = wire::ToTrainer::Kind::kBroken, .link = last_link(1)});
  exchange();
  EXPECT_EQ(hello_count(), hellos) << "nothing that it says counts";
}

TEST_F(PoolSessionTest, LastWorkerOfThoseThatLieIsAskedOnAndItsRequestFails) {
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  ask(0);
  EXPECT_TRUE(session_.distrust(1, batch(0), "it lies", now_));
  exchange();
  for (int count = 0; count < 3; ++count) {
    EXPECT_EQ(this->count(Kind::kFail), 0u);
    EXPECT_FALSE(session_.distrust(2, batch(0), "it lies", now_));
    exchange();
    pass(milliseconds(100));
  }
  EXPECT_EQ(count(Kind::kFail), 1u);
}

TEST_F(PoolSessionTest, WorkerThatWasJustNamedIsThereToMakeWhatAnotherAnswersWrongly) {
  is_cut_[2] = true;
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  EXPECT_TRUE(session_.distrust(1, batch(0), "it lies", now_));
  EXPECT_EQ(count(Kind::kFail), 0u);
}

TEST_F(PoolSessionTest, WorkerThatDoesNotAnswerForLongIsNotThere) {
  is_cut_[2] = true;
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  pass(kSilentTurn);
  pass(milliseconds(100));
  EXPECT_EQ(session_.open_count(), 1u);
  EXPECT_FALSE(session_.distrust(1, std::nullopt, "it lies", now_));
}

TEST_F(PoolSessionTest, WrongPiecesAreTheNetworksFaultUntilTheyAreTooManyInARow) {
  constexpr auto kPerhaps = PoolSession::Wrong::kMaybeInFlight;
  roster({{.worker_id = 1, .incarnation = 1}, {.worker_id = 2, .incarnation = 1}});
  uint64_t sequence = 0;
  for (uint32_t round = 0; round < 2; ++round) {
    for (uint32_t count = 0; count < kDoubtCountMax; ++count) {
      ask(sequence++);
      EXPECT_FALSE(session_.distrust(1, std::nullopt, "its seal does not fit", now_, kPerhaps));
      exchange();
      EXPECT_EQ(session_.open_count(), 1u);
      work();
      pass(kRemakePauseMax);
      EXPECT_EQ(session_.open_count(), 2u) << "it is greeted again";
    }
    // An answer that counts makes up for them.
    for (int count = 0; count < 4; ++count) ask(sequence++);
    work();
  }
  EXPECT_EQ(taken().size(), sequence);
  for (uint32_t count = 0; count < kDoubtCountMax; ++count) {
    EXPECT_FALSE(session_.distrust(1, std::nullopt, "its seal does not fit", now_, kPerhaps));
    pass(kRemakePauseMax);
  }
  EXPECT_TRUE(session_.distrust(1, std::nullopt, "its seal does not fit", now_, kPerhaps));
  EXPECT_EQ(count(Kind::kFail), 0u);
}

// A worker that said so with each message kept its requests for ever, at the speed of round trips.
TEST_F(PoolSessionTest, WorkerWhoseLinksBreakTimeAndAgainHoldsNoRequestUp) {
  roster({{.worker_id = 1, .incarnation = 1}});
  ask(0);
  const auto greeted = [&] {
    uint32_t link = 0;
    for (const auto& command : commands_)
      if (command.kind == Kind::kSend && command.message.kind == In::kHello) link = command.message.link;
    return link;
  };
  for (int count = 0; count < 100 && this->count(Kind::kDistrust) == 0; ++count) {
    deliver(1, {.kind = wire::ToTrainer::Kind::kBroken, .link = greeted()});
    exchange();
    if (this->count(Kind::kDistrust) == 0) pass(kRemakePauseMax);
  }
  ASSERT_EQ(count(Kind::kDistrust), 1u);
  EXPECT_EQ(session_.open_count(), 0u);
  pass(milliseconds(100));
  work();
  EXPECT_EQ(taken(), std::vector<uint64_t>{0}) << "it answers now";
}

// Each took descriptors of the trainer, until it could open no file any more.
TEST_F(PoolSessionTest, ThousandsThatDoNotAnswerTakeTurnsToBeConnectedTo) {
  constexpr uint64_t kSilent = 1000, kHonest = 5000;
  std::vector<wire::RosterEntry> entries;
  for (uint64_t id = 1; id <= kSilent; ++id) {
    entries.push_back({.worker_id = id, .incarnation = 1});
    is_cut_[id] = true;
  }
  entries.push_back({.worker_id = kHonest, .incarnation = 1});
  roster(entries);
  EXPECT_EQ(session_.known_count(), kSilent + 1);
  for (uint64_t turn = 0; turn <= kSilent / kSilentCountMax + 1; ++turn) {
    EXPECT_LE(count(Kind::kConnect) - count(Kind::kDisconnect), kSilentCountMax + 1);
    pass(kSilentTurn);
    roster(entries);  // as a controller says it again and again
  }
  EXPECT_EQ(session_.open_count(), 1u);
  ask(0);
  work();
  EXPECT_EQ(taken(), std::vector<uint64_t>{0});
}

TEST_F(PoolSessionTest, WorkersThatAnswerAreAllConnectedToAtOnce) {
  std::vector<wire::RosterEntry> entries;
  for (uint64_t id = 1; id <= 3 * kSilentCountMax; ++id) entries.push_back({.worker_id = id, .incarnation = 1});
  roster(entries);
  EXPECT_EQ(session_.open_count(), entries.size());
}

}  // namespace
}  // namespace penstock::session
