// SPDX-License-Identifier: Apache-2.0
#include "worker/maker_watch.h"

#include <gtest/gtest.h>

namespace penstock::worker {
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

  MakerWatch watch_;
  Instant now_{};
};

TEST_F(MakerWatchTest, WantedBatchMayTakeAnyTime) {
  pass(minutes(60), State::kMaking);
  pass(minutes(60), State::kWaiting);
  EXPECT_FALSE(watch_.is_stuck());
  EXPECT_FALSE(watch_.is_lost(kAbandonedGrace));
}

TEST_F(MakerWatchTest, BatchThatNobodyWantsIsStuckFirstAndThenLost) {
  pass(seconds(30), State::kMaking);
  pass(kStuckAfter - milliseconds(100), State::kAbandoned);
  EXPECT_FALSE(watch_.is_stuck());
  pass(milliseconds(100), State::kAbandoned);
  EXPECT_TRUE(watch_.is_stuck());
  EXPECT_EQ(watch_.abandoned(), kStuckAfter);
  EXPECT_FALSE(watch_.is_lost(kAbandonedGrace));
  pass(kAbandonedGrace - kStuckAfter, State::kAbandoned);
  EXPECT_TRUE(watch_.is_lost(kAbandonedGrace));
}

TEST_F(MakerWatchTest, OneThatComesBackIsOfUseAgain) {
  pass(seconds(9), State::kAbandoned);
  pass(milliseconds(100), State::kWaiting);
  EXPECT_FALSE(watch_.is_stuck());
  pass(seconds(9), State::kAbandoned);
  EXPECT_FALSE(watch_.is_lost(kAbandonedGrace));
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
  EXPECT_FALSE(watch_.is_lost(kAbandonedGrace));
  pass(seconds(1), State::kAbandoned);
  EXPECT_TRUE(watch_.is_lost(kAbandonedGrace));
  pass(seconds(1), State::kWaiting);
  watch_.begin_tenancy();
  pass(kAbandonedGrace, State::kAbandoned);
  EXPECT_TRUE(watch_.is_lost(kAbandonedGrace)) << "that was another trainer";
}

TEST_F(MakerWatchTest, TimeInWhichTheWholeProcessWasStoppedIsNotTheMakers) {
  pass(seconds(1), State::kAbandoned);
  now_ += minutes(10);
  watch_.note(State::kAbandoned, now_);
  EXPECT_FALSE(watch_.is_lost(kAbandonedGrace));
}

}  // namespace
}  // namespace penstock::worker
