// SPDX-License-Identifier: Apache-2.0
#include "server/maker.h"

#include <gtest/gtest.h>

namespace penstock::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using State = MakerWatch::State;

class MakerWatchTest : public testing::Test {
 protected:
  // Notes the state every now and then.
  void pass(Duration time, State state) {
    const Instant end = now_ + time;
    for (watch_.note(state, now_); now_ < end; watch_.note(state, now_)) now_ += milliseconds(100);
  }

  bool is_lost() const { return watch_.is_lost({}); }

  MakerWatch watch_;
  Instant now_{};
};

TEST_F(MakerWatchTest, WantedBatchMayTakeAnyTime) {
  pass(minutes(60), State::kMaking);
  pass(minutes(60), State::kWaiting);
  EXPECT_FALSE(watch_.is_stuck());
  EXPECT_FALSE(is_lost());
}

TEST_F(MakerWatchTest, BatchThatNobodyWantsIsStuckFirstAndThenLost) {
  watch_.begin_tenancy();
  watch_.note_made(milliseconds(1));
  pass(seconds(30), State::kMaking);
  pass(kStuckAfter - milliseconds(100), State::kAbandoned);
  EXPECT_FALSE(watch_.is_stuck());
  pass(milliseconds(100), State::kAbandoned);
  EXPECT_TRUE(watch_.is_stuck());
  EXPECT_EQ(watch_.abandoned(), kStuckAfter);
  EXPECT_FALSE(is_lost());
  pass(kAbandonedGrace - kStuckAfter, State::kAbandoned);
  EXPECT_TRUE(is_lost());
}

// A dataset opened an index for 60 s in its first batch, which another worker had made before: each worker that was
// late was ended after 10 s, and so was the process that took its place.
TEST_F(MakerWatchTest, FirstBatchOfATrainerHasMuchLonger) {
  watch_.begin_tenancy();
  pass(kStuckAfter, State::kAbandoned);
  EXPECT_TRUE(watch_.is_stuck()) << "others do not wait for it";
  pass(seconds(58), State::kAbandoned);
  EXPECT_FALSE(is_lost());
  pass(kFirstBatchGrace - seconds(61), State::kAbandoned);
  EXPECT_FALSE(is_lost());
  pass(seconds(1), State::kAbandoned);
  EXPECT_TRUE(is_lost());
}

TEST_F(MakerWatchTest, FirstBatchThatWasAnErrorAtOnceLeavesTheUsualGrace) {
  watch_.begin_tenancy();
  watch_.note_made(Duration(0));
  pass(kAbandonedGrace, State::kAbandoned);
  EXPECT_TRUE(is_lost());
}

TEST_F(MakerWatchTest, OneThatComesBackIsOfUseAgain) {
  watch_.note_made(milliseconds(1));
  pass(seconds(9), State::kAbandoned);
  pass(milliseconds(100), State::kWaiting);
  EXPECT_FALSE(watch_.is_stuck());
  pass(seconds(9), State::kAbandoned);
  EXPECT_FALSE(is_lost());
}

// Where a batch takes half a minute, one that is cancelled must not cost the worker its process, and the dataset its
// caches.
TEST_F(MakerWatchTest, WorkerWhoseBatchesTakeLongHasMoreTime) {
  watch_.begin_tenancy();
  watch_.note_made(seconds(30));
  watch_.note_made(seconds(1));
  pass(seconds(29), State::kAbandoned);
  EXPECT_FALSE(watch_.is_stuck());
  pass(seconds(30), State::kAbandoned);
  EXPECT_TRUE(watch_.is_stuck());
  EXPECT_FALSE(is_lost());
  pass(seconds(1), State::kAbandoned);
  EXPECT_TRUE(is_lost());
  pass(seconds(1), State::kWaiting);
  watch_.begin_tenancy();
  watch_.note_made(seconds(1));
  pass(kAbandonedGrace, State::kAbandoned);
  EXPECT_TRUE(is_lost()) << "that was another trainer";
}

TEST_F(MakerWatchTest, TimeInWhichTheWholeProcessWasStoppedIsNotTheMakers) {
  watch_.note_made(milliseconds(1));
  pass(seconds(1), State::kAbandoned);
  now_ += minutes(10);
  watch_.note(State::kAbandoned, now_);
  EXPECT_FALSE(is_lost());
}

TEST_F(MakerWatchTest, DrainIsOverAfterItsGraceAndNeverWithoutAnOrder) {
  EXPECT_FALSE(is_drain_over(std::nullopt, seconds(0), now_));
  EXPECT_FALSE(is_drain_over(now_, seconds(30), now_ + milliseconds(29'999)));
  EXPECT_TRUE(is_drain_over(now_, seconds(30), now_ + seconds(30)));
}

}  // namespace
}  // namespace penstock::server
