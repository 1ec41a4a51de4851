// SPDX-License-Identifier: Apache-2.0
#include "session/worker_session.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "wire/reports.h"

namespace penstock::session {
namespace {

using std::chrono::milliseconds;
using In = wire::ToWorker::Kind;
using Out = wire::ToTrainer::Kind;

class WorkerSessionTest : public testing::Test {
 protected:
  static wire::BatchKey batch(uint64_t sequence) { return {.epoch = 1, .sequence = sequence}; }

  // Sends a message of trainer 7 on the link of the last hello, with the next stamp.
  void send(wire::ToWorker message) {
    message.trainer_id = trainer_id_;
    message.link = link_;
    message.stamp = ++stamp_;
    session_.receive(message, now_);
    collect();
  }
  void hello(uint32_t link, uint32_t repeated_count = 0, bool is_continued = false) {
    link_ = link;
    stamp_ = 0;
    send({.kind = In::kHello, .is_continued = is_continued, .count = repeated_count});
  }
  void request(uint64_t sequence) { send({.kind = In::kRequest, .key = batch(sequence)}); }
  std::optional<uint64_t> begin() {
    const auto begun = session_.begin();
    collect();
    return begun ? std::optional(begun->key.sequence) : std::nullopt;
  }
  void finish() {
    session_.finished();
    collect();
  }

  void collect() {
    for (const auto& command : session_.take_commands()) {
      if (command.kind == WorkerSession::Command::Kind::kDrop) {
        dropped_.push_back(command.key.sequence);
      } else {
        sent_messages_.push_back(command.message.kind);
        last_ = command;
      }
    }
  }
  std::vector<Out> said() { return std::exchange(sent_messages_, {}); }
  std::vector<uint64_t> dropped() { return std::exchange(dropped_, {}); }

  WorkerSession session_;
  Instant now_{};
  uint64_t trainer_id_ = 7;
  uint32_t link_ = 0;
  uint64_t stamp_ = 0;
  std::vector<Out> sent_messages_;
  std::vector<uint64_t> dropped_;
  WorkerSession::Command last_;
};

TEST_F(WorkerSessionTest, MakesBatchesOneByOneInTheOrderOfTheRequests) {
  hello(1);
  EXPECT_TRUE(last_.message.is_fresh);
  request(4);
  request(5);
  EXPECT_EQ(begin(), 4u);
  EXPECT_EQ(begin(), std::nullopt);
  EXPECT_EQ(session_.next()->key, batch(5));
  finish();
  EXPECT_EQ(begin(), 5u);
  EXPECT_FALSE(session_.next());
  EXPECT_EQ(said(), (std::vector{Out::kWelcome, Out::kStarted, Out::kAnswer, Out::kStarted}));
  EXPECT_EQ(last_.trainer_id, 7u);
  EXPECT_EQ(last_.message.stamp, 4u);
}

// The first batch is being made for another trainer.
TEST_F(WorkerSessionTest, ALaterRequestMayBeStartedFirst) {
  hello(1);
  for (const uint64_t sequence : {4, 5, 6}) request(sequence);
  ASSERT_EQ(session_.queue().size(), 3u);
  EXPECT_EQ(session_.begin(batch(5)).key, batch(5));
  EXPECT_EQ(begin(), std::nullopt);
  finish();
  EXPECT_EQ(begin(), 4u);
  finish();
  EXPECT_EQ(begin(), 6u);
  EXPECT_EQ(said(),
            (std::vector{Out::kWelcome, Out::kStarted, Out::kAnswer, Out::kStarted, Out::kAnswer, Out::kStarted}));
}

TEST_F(WorkerSessionTest, AnswerIsHeldUntilItIsAcknowledged) {
  hello(1);
  request(0);
  begin();
  finish();
  EXPECT_EQ(session_.held_count(), 1u);
  EXPECT_FALSE(session_.is_empty());
  send({.kind = In::kAck, .key = batch(0)});
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0}));
  EXPECT_TRUE(session_.is_empty());
}

class ContinuedLink : public WorkerSessionTest {
 protected:
  ContinuedLink() {
    hello(1);
    for (uint64_t sequence = 0; sequence < 4; ++sequence) request(sequence);
    begin();
    finish();
    begin();
    finish();
    begin();  // 0 and 1 are held, 2 is being made, 3 waits
    stamp_ += 1;
    request(4);
    EXPECT_EQ(said().back(), Out::kBroken);
    EXPECT_EQ(last_.message.link, 1u);
  }
};

TEST_F(ContinuedLink, SendsAgainWhatIsAskedForAndForgetsTheRest) {
  hello(2, /*repeated_count=*/3, /*is_continued=*/true);
  EXPECT_FALSE(last_.message.is_fresh);
  said();
  request(1);
  EXPECT_EQ(said(), (std::vector{Out::kAnswer}));
  request(2);
  EXPECT_TRUE(session_.is_wanted());
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{}));
  request(4);
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0}));
  finish();
  EXPECT_EQ(begin(), 4u);  // 3 was not asked for again
}

TEST_F(ContinuedLink, WhatIsBeingMadeMayBeWantedUntilTheTrainerHasSaidAll) {
  hello(2, 1, true);
  EXPECT_FALSE(session_.is_wanted());
  EXPECT_TRUE(session_.may_be_wanted());
  request(4);
  EXPECT_FALSE(session_.may_be_wanted());
}

TEST_F(ContinuedLink, WhatIsFinishedMeanwhileCanStillBeClaimed) {
  hello(2, 2, true);
  finish();
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{}));
  said();
  request(2);
  EXPECT_EQ(said(), (std::vector{Out::kAnswer}));
  request(3);
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0, 1}));
}

TEST_F(ContinuedLink, NothingIsBegunBeforeAllIsRepeated) {
  hello(2, 2, true);
  finish();
  request(3);
  EXPECT_EQ(begin(), std::nullopt);
  EXPECT_FALSE(session_.next());
  request(2);
  EXPECT_EQ(begin(), 3u);
}

TEST_F(ContinuedLink, TrainerThatKnowsNothingBeginsAnew) {
  hello(2);
  EXPECT_TRUE(last_.message.is_fresh);
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0, 1}));
  request(2);
  EXPECT_FALSE(session_.is_wanted());  // the batch that is being made is of the link before
  finish();
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{2}));
  EXPECT_EQ(begin(), 2u);
}

TEST_F(ContinuedLink, WorkerThatForgotSaysSoAndSkipsWhatIsRepeated) {
  now_ += kLease;
  session_.tick(now_);
  collect();
  EXPECT_EQ(session_.trainer_id(), 0u);
  finish();
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0, 1, 2}));
  hello(2, 1, true);
  EXPECT_TRUE(last_.message.is_fresh);
  request(3);
  EXPECT_EQ(begin(), std::nullopt);
  request(3);
  EXPECT_EQ(begin(), 3u);
}

// A trainer was given the first batch of a shard again, in the middle of it.
TEST_F(ContinuedLink, WorkerThatForgotSaysSoUntilTheTrainerHasReadIt) {
  session_.abandon();
  finish();
  hello(2, 1, true);  // the answer to this is lost
  request(3);
  hello(3, 1, true);
  EXPECT_TRUE(last_.message.is_fresh);
  request(3);
  EXPECT_EQ(begin(), std::nullopt);
  request(3);  // anew, which shows that the trainer knows
  EXPECT_EQ(begin(), 3u);
  hello(4, 1, true);
  EXPECT_FALSE(last_.message.is_fresh);
  request(3);
  EXPECT_TRUE(session_.is_wanted());
}

// A trainer waited for ever on a link that looked well, for a batch that its worker had forgotten.
TEST_F(ContinuedLink, HelloThatComesTwiceDoesNotBringBackWhoWasForgotten) {
  now_ += kLease;
  session_.tick(now_);
  session_.receive({.kind = In::kHello, .trainer_id = 7, .link = 1, .stamp = 1}, now_);
  EXPECT_EQ(session_.trainer_id(), 0u);
  hello(2);
  EXPECT_EQ(session_.trainer_id(), 7u);
}

TEST_F(WorkerSessionTest, OldMessagesAndLinksAreDropped) {
  hello(3);
  request(0);
  session_.receive({.kind = In::kRequest, .trainer_id = 7, .link = 3, .stamp = 2, .key = batch(0)}, now_);
  session_.receive({.kind = In::kRequest, .trainer_id = 7, .link = 2, .stamp = 3, .key = batch(1)}, now_);
  session_.receive({.kind = In::kHello, .trainer_id = 7, .link = 2, .stamp = 1}, now_);
  EXPECT_EQ(session_.queued_count(), 1u);
  request(1);
  EXPECT_EQ(session_.queued_count(), 2u);
}

TEST_F(WorkerSessionTest, SecondTrainerIsRefusedUntilTheFirstIsGone) {
  hello(1);
  trainer_id_ = 8;
  hello(1);
  EXPECT_EQ(last_.message.kind, Out::kRefused);
  EXPECT_EQ(last_.trainer_id, 8u);
  EXPECT_EQ(session_.trainer_id(), 7u);
  now_ += kLease;
  EXPECT_EQ(session_.next_tick(), now_);
  session_.tick(now_);
  hello(2);
  EXPECT_EQ(last_.message.kind, Out::kWelcome);
  EXPECT_EQ(session_.trainer_id(), 8u);
}

TEST_F(WorkerSessionTest, StrangerIsToldThatItHasNoLink) {
  request(0);
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
  send({.kind = In::kBye});
  EXPECT_EQ(said(), (std::vector<Out>{}));
}

TEST_F(WorkerSessionTest, CancelledRequestIsNotMadeAndItsAnswerNotSent) {
  hello(1);
  request(0);
  request(1);
  begin();
  said();
  send({.kind = In::kCancel, .key = batch(0)});
  send({.kind = In::kCancel, .key = batch(1)});
  EXPECT_FALSE(session_.is_wanted());
  finish();
  EXPECT_EQ(said(), (std::vector<Out>{}));
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(begin(), std::nullopt);
}

TEST_F(WorkerSessionTest, DrainGivesBackWhatWasNotBegun) {
  hello(1);
  request(0);
  request(1);
  begin();
  said();
  session_.drain();
  collect();
  EXPECT_EQ(said(), (std::vector{Out::kLeaving, Out::kHandedBack}));
  request(2);
  EXPECT_EQ(said(), (std::vector{Out::kHandedBack}));
  EXPECT_FALSE(session_.is_empty());
  finish();
  send({.kind = In::kAck, .key = batch(0)});
  EXPECT_TRUE(session_.is_empty());
  send({.kind = In::kBye});
  trainer_id_ = 8;
  hello(1);
  EXPECT_EQ(last_.message.kind, Out::kRefused);
}

// A worker that had no descriptor left for another job ended, and its trainer took that for a death by its batch.
TEST_F(WorkerSessionTest, WorkThatCannotBeDoneHereIsHandedBackWithTheRest) {
  hello(1);
  request(0);
  request(1);
  begin();
  said();
  session_.hand_back();
  collect();
  EXPECT_EQ(said(), (std::vector{Out::kLeaving, Out::kHandedBack, Out::kHandedBack}));
  EXPECT_EQ(last_.message.key, batch(0));
  EXPECT_TRUE(session_.is_draining());
  EXPECT_TRUE(session_.is_empty());
}

TEST_F(WorkerSessionTest, WorkThatNobodyWantsIsHandedBackInSilence) {
  hello(1);
  request(0);
  begin();
  send({.kind = In::kCancel, .key = batch(0)});
  said();
  session_.hand_back();
  collect();
  EXPECT_EQ(said(), (std::vector{Out::kLeaving}));
  EXPECT_TRUE(session_.is_empty());
}

class LostProcess : public WorkerSessionTest {
 protected:
  void lose() {
    said();
    session_.lose_process(session_.trainer_id());
    collect();
  }
  void request_of_lane(uint64_t sequence, bool is_start) {
    send({.kind = In::kRequest, .key = batch(sequence), .lane = 1, .is_lane_start = is_start});
  }
};

TEST_F(LostProcess, IsToldWithTheBatchThatItWasMakingAndAllElseIsGivenUp) {
  hello(1);
  for (uint64_t sequence = 0; sequence < 3; ++sequence) request(sequence);
  begin();
  finish();
  begin();  // 0 is held, 1 is being made, 2 waits
  lose();
  EXPECT_EQ(said(), (std::vector{Out::kDied}));
  EXPECT_EQ(last_.trainer_id, 7u);
  EXPECT_EQ(last_.message.link, 1u);
  EXPECT_EQ(last_.message.stamp, 5u);
  EXPECT_EQ(last_.message.key, batch(1));
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0}));
  EXPECT_FALSE(session_.is_busy());
  EXPECT_TRUE(session_.is_empty());
  EXPECT_EQ(session_.trainer_id(), 0u);
  EXPECT_EQ(session_.next_tick(), std::nullopt);
  request(3);  // which was under way
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
}

TEST_F(LostProcess, LeavesAWorkerThatWelcomesItsTrainerAfresh) {
  hello(1);
  request(0);
  request(1);
  begin();
  lose();
  hello(2, /*repeated_count=*/1, /*is_continued=*/true);
  EXPECT_EQ(last_.message.kind, Out::kWelcome);
  EXPECT_TRUE(last_.message.is_fresh);
  request(1);  // which will be asked for anew
  EXPECT_EQ(begin(), std::nullopt);
  request(0);
  EXPECT_EQ(begin(), 0u);
  finish();
  EXPECT_EQ(said().back(), Out::kAnswer);
}

TEST_F(LostProcess, TakesItsLanesWithIt) {
  hello(1);
  request_of_lane(0, /*is_start=*/true);
  begin();
  finish();
  send({.kind = In::kAck, .key = batch(0)});
  lose();
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
  hello(2, /*repeated_count=*/1, /*is_continued=*/true);
  request_of_lane(1, /*is_start=*/false);
  EXPECT_EQ(begin(), std::nullopt) << "it has nothing of the lane";
  request_of_lane(1, /*is_start=*/true);
  EXPECT_EQ(begin(), 1u);
}

TEST_F(LostProcess, IsABrokenLinkWhereNothingWasBeingMade) {
  hello(1);
  request(0);
  begin();
  finish();
  lose();
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
  EXPECT_EQ(last_.trainer_id, 7u);
  EXPECT_EQ(last_.message.link, 1u);
  EXPECT_EQ(last_.message.stamp, 0u);
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(session_.trainer_id(), 0u);
}

TEST_F(LostProcess, BlamesNoBatchThatNobodyWants) {
  hello(1);
  request(0);
  begin();
  send({.kind = In::kCancel, .key = batch(0)});
  lose();
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{}));
  EXPECT_TRUE(session_.is_empty());
}

TEST_F(LostProcess, BlamesNoBatchOfATrainerForThatOfTheOneBefore) {
  hello(1);
  request(0);
  begin();
  send({.kind = In::kBye});
  trainer_id_ = 8;
  hello(1);
  request(0);
  lose();
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
  EXPECT_EQ(last_.trainer_id, 8u);
  EXPECT_TRUE(session_.is_empty());
  hello(2);
  request(0);
  EXPECT_EQ(begin(), 0u) << "nothing is waited for";
}

TEST_F(LostProcess, IsSaidOnALinkOnWhichSomethingWasLostToBeBroken) {
  hello(1);
  request(0);
  begin();
  stamp_ += 1;
  request(1);
  lose();
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
  EXPECT_EQ(last_.message.stamp, 0u);
  EXPECT_TRUE(session_.is_empty());
}

TEST_F(LostProcess, IsNoNewsWithoutATrainer) {
  lose();
  EXPECT_EQ(said(), (std::vector<Out>{}));
  hello(1);
  request(0);
  begin();
  send({.kind = In::kBye});
  lose();
  EXPECT_EQ(said(), (std::vector<Out>{}));
  EXPECT_FALSE(session_.is_busy());
  hello(2);
  EXPECT_EQ(said(), (std::vector{Out::kWelcome}));
}

TEST_F(LostProcess, IsToldByAWorkerThatLeaves) {
  hello(1);
  request(0);
  begin();
  session_.drain();
  collect();
  lose();
  EXPECT_EQ(said(), (std::vector{Out::kDied}));
  EXPECT_TRUE(session_.is_empty());
  hello(2);
  EXPECT_EQ(said(), (std::vector{Out::kRefused}));
}

class DecliningDesk : public WorkerSessionTest {
 protected:
  void decline() {
    session_.decline();
    collect();
  }
};

TEST_F(DecliningDesk, GivesTheTrainerUpWithAllThatItAskedFor) {
  hello(1);
  for (uint64_t sequence = 0; sequence < 3; ++sequence) request(sequence);
  begin();
  finish();
  begin();  // 0 is held, 1 is being made, 2 waits
  said();
  decline();
  EXPECT_EQ(said(), (std::vector{Out::kDeclined}));
  EXPECT_EQ(last_.trainer_id, 7u);
  EXPECT_EQ(last_.message.link, 1u);
  EXPECT_EQ(last_.message.stamp, 0u);
  EXPECT_EQ(session_.trainer_id(), 0u);
  EXPECT_EQ(session_.next_tick(), std::nullopt);
  EXPECT_EQ(session_.queued_count(), 0u);
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0}));
  EXPECT_TRUE(session_.is_busy());
  EXPECT_FALSE(session_.is_wanted());
  finish();
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{1}));
  EXPECT_EQ(said(), (std::vector<Out>{}));
  EXPECT_TRUE(session_.is_empty());
}

TEST_F(DecliningDesk, AnswersEveryLaterHelloTheSameWay) {
  hello(1);
  decline();
  EXPECT_TRUE(session_.is_declined(7));
  said();
  hello(2, /*repeated_count=*/1, /*is_continued=*/true);
  EXPECT_EQ(said(), (std::vector{Out::kDeclined}));
  EXPECT_EQ(last_.message.link, 2u);
  EXPECT_EQ(last_.message.stamp, 0u);
  request(0);  // which was under way
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
  EXPECT_EQ(begin(), std::nullopt);
}

TEST_F(DecliningDesk, SaysSoOnALinkOnWhichSomethingWasLost) {
  hello(1);
  stamp_ += 1;
  request(0);
  EXPECT_EQ(said(), (std::vector{Out::kWelcome, Out::kBroken}));
  decline();
  EXPECT_EQ(said(), (std::vector{Out::kDeclined}));
}

TEST_F(DecliningDesk, WorksForAnotherTrainer) {
  hello(1);
  request(0);
  begin();
  decline();
  trainer_id_ = 8;
  hello(1);
  EXPECT_EQ(last_.message.kind, Out::kWelcome);
  EXPECT_FALSE(session_.is_declined(8));
  request(0);
  finish();  // the requests of the first
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(begin(), 0u);
  // The first is not told that the worker is taken, but that it is not for it.
  session_.receive({.kind = In::kHello, .trainer_id = 7, .link = 2, .stamp = 1}, now_);
  collect();
  EXPECT_EQ(last_.message.kind, Out::kDeclined);
  EXPECT_EQ(last_.trainer_id, 7u);
  EXPECT_EQ(session_.trainer_id(), 8u);
}

TEST_F(DecliningDesk, WithoutATrainerItDeclinesNobody) {
  decline();
  EXPECT_EQ(said(), (std::vector<Out>{}));
  hello(1);
  EXPECT_EQ(last_.message.kind, Out::kWelcome);
}

TEST_F(DecliningDesk, RemembersTheLatestAlone) {
  for (trainer_id_ = 1; trainer_id_ <= wire::kDeclinedCountMax + 1; ++trainer_id_) {
    hello(1);
    decline();
  }
  EXPECT_FALSE(session_.is_declined(1));
  for (uint64_t trainer_id = 2; trainer_id <= wire::kDeclinedCountMax + 1; ++trainer_id)
    EXPECT_TRUE(session_.is_declined(trainer_id)) << trainer_id;
}

TEST_F(WorkerSessionTest, OnlyTheTrainerThatItWasGivenToIsServed) {
  session_.assign(8, /*is_to_part=*/false);
  hello(1);
  EXPECT_EQ(said(), (std::vector{Out::kRefused}));
  session_.assign(7, false);
  hello(2);
  EXPECT_EQ(said(), (std::vector{Out::kWelcome}));
}

TEST_F(WorkerSessionTest, GoodbyeForGoodCountsThoughMessagesBeforeItWereLost) {
  hello(1);
  request(0);
  stamp_ += 1;
  send({.kind = In::kBye, .is_continued = true});
  EXPECT_EQ(said().back(), Out::kBroken);
  EXPECT_EQ(session_.trainer_id(), 7u);
  send({.kind = In::kBye});
  EXPECT_EQ(session_.trainer_id(), 0u);
}

TEST_F(WorkerSessionTest, ServedTrainerGoesOnWhenItIsNoLongerNamed) {
  session_.assign(7, false);
  hello(1);
  session_.assign(0, false);
  hello(2, 0, /*is_continued=*/true);
  EXPECT_EQ(said(), (std::vector{Out::kWelcome, Out::kWelcome}));
  send({.kind = In::kBye});
  hello(3);
  EXPECT_EQ(said(), (std::vector{Out::kRefused}));
}

TEST_F(WorkerSessionTest, TrainerThatItIsToPartFromIsToldAndForgottenWithItsBatches) {
  hello(1);
  request(0);
  request(1);
  begin();
  finish();
  begin();
  said();
  session_.assign(7, /*is_to_part=*/true);
  collect();
  EXPECT_EQ(said(), std::vector<Out>{}) << "it is the one that may stay";
  session_.assign(8, /*is_to_part=*/true);
  collect();
  EXPECT_EQ(said(), (std::vector{Out::kBroken}));
  EXPECT_EQ(last_.trainer_id, 7u);
  EXPECT_EQ(last_.message.link, 1u);
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{0}));
  EXPECT_EQ(session_.trainer_id(), 0u);
  finish();
  EXPECT_EQ(dropped(), (std::vector<uint64_t>{1}));
  hello(2);
  EXPECT_EQ(said(), (std::vector{Out::kRefused}));
  trainer_id_ = 8;
  hello(1);
  EXPECT_EQ(said(), (std::vector{Out::kWelcome}));
}

}  // namespace
}  // namespace penstock::session
