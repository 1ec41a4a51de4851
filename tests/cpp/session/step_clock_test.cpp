// SPDX-License-Identifier: Apache-2.0
#include "session/step_clock.h"

#include <gtest/gtest.h>

namespace penstock::session {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class StepClockTest : public testing::Test {
 protected:
  // The program trains for so long, and waits for its next batch.
  void train(Duration step, Duration waited = {}) {
    waited_ += waited;
    now_ += step + waited;
    clock_.give(now_, waited_);
  }
  void warm_up() {
    for (size_t step = 0; step <= kWarmUpSteps; ++step) train(seconds(3));
  }

  StepClock clock_;
  Instant now_{};
  Duration waited_{};
};

TEST_F(StepClockTest, StepsAndWaitsAreToldApart) {
  warm_up();
  const StepTimes before = clock_.times();
  for (int step = 0; step < 100; ++step) train(milliseconds(20), milliseconds(5));
  EXPECT_EQ(clock_.times().step_count - before.step_count, 100U);
  EXPECT_EQ(clock_.times().stepping - before.stepping, milliseconds(2000));
  EXPECT_EQ(clock_.times().starved - before.starved, milliseconds(500));
  EXPECT_EQ(clock_.times().paused, before.paused);
}

TEST_F(StepClockTest, FirstStepsArePausesWithTheirWaits) {
  for (size_t step = 0; step <= kWarmUpSteps; ++step) train(seconds(2), seconds(1));
  EXPECT_EQ(clock_.times().starved, Duration{});
  EXPECT_EQ(clock_.times().paused, kWarmUpSteps * seconds(3) + seconds(1));
}

TEST_F(StepClockTest, FirstStepsArePauses) {
  warm_up();
  EXPECT_EQ(clock_.times().step_count, 0U);
  EXPECT_EQ(clock_.times().paused, kWarmUpSteps * seconds(3));
}

// A pool gives the workers to others meanwhile, and the first batch after an evaluation waits for them to come back.
TEST_F(StepClockTest, AnEvaluationIsAPauseWithTheWaitAfterIt) {
  warm_up();
  for (int step = 0; step < 40; ++step) train(milliseconds(20));
  const StepTimes before = clock_.times();
  train(seconds(30), milliseconds(700));
  EXPECT_EQ(clock_.times().paused - before.paused, milliseconds(30700));
  EXPECT_EQ(clock_.times().step_count, before.step_count);
  EXPECT_EQ(clock_.times().starved, before.starved);
}

TEST_F(StepClockTest, StepsThatBecomeLongerForGoodAreSteps) {
  warm_up();
  for (int step = 0; step < 64; ++step) train(milliseconds(20));
  for (int step = 0; step < 64; ++step) train(milliseconds(900));
  const StepTimes before = clock_.times();
  for (int step = 0; step < 64; ++step) train(milliseconds(900));
  EXPECT_EQ(clock_.times().step_count - before.step_count, 64U);
}

TEST_F(StepClockTest, TheWaitForAnEpochsFirstBatchIsAPause) {
  warm_up();
  for (int step = 0; step < 40; ++step) train(milliseconds(20));
  clock_.end_epoch();
  EXPECT_FALSE(clock_.is_in_epoch());
  const StepTimes before = clock_.times();
  train(seconds(2), milliseconds(300));
  EXPECT_EQ(clock_.times().starved, before.starved);
  EXPECT_EQ(clock_.times().step_count, before.step_count);
  EXPECT_EQ(clock_.times().paused - before.paused, milliseconds(300));
  EXPECT_EQ(clock_.given_at(), now_);
}

}  // namespace
}  // namespace penstock::session
