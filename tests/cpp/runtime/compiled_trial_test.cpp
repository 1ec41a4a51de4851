// SPDX-License-Identifier: Apache-2.0
#include "runtime/compiled_trial.h"

#include <gtest/gtest.h>

namespace penstock::runtime {
namespace {

using Choice = CompiledTrial::Choice;

// Notes equal batches until the trial is over.
CompiledTrial tried(double executor_s, double compiled_s) {
  CompiledTrial trial;
  for (size_t batch = 0; batch < CompiledTrial::kWarmups + CompiledTrial::kTimed; ++batch) {
    EXPECT_EQ(trial.next(), Choice::kBoth);
    EXPECT_FALSE(trial.is_used());
    trial.note(true, executor_s, compiled_s);
  }
  return trial;
}

TEST(CompiledTrial, FasterCodeOfTheSameBitsIsUsed) {
  CompiledTrial trial = tried(2.0, 1.0);
  EXPECT_TRUE(trial.is_used());
  EXPECT_EQ(trial.next(), Choice::kCompiled);
}

TEST(CompiledTrial, CodeThatIsHardlyFasterIsNot) {
  CompiledTrial trial = tried(1.0, 0.97);
  EXPECT_TRUE(trial.is_refused());
  EXPECT_EQ(trial.next(), Choice::kExecutor);
}

TEST(CompiledTrial, TheFirstCallsAreNotTimed) {
  CompiledTrial trial;
  for (size_t batch = 0; batch < CompiledTrial::kWarmups; ++batch) trial.note(true, 0.0, 100.0);
  for (size_t batch = 0; batch < CompiledTrial::kTimed; ++batch) trial.note(true, 2.0, 1.0);
  EXPECT_TRUE(trial.is_used());
}

TEST(CompiledTrial, AFewSlowCallsDoNotDecide) {
  CompiledTrial trial;
  for (size_t batch = 0; batch < CompiledTrial::kWarmups + CompiledTrial::kTimed; ++batch)
    trial.note(true, 2.0, batch % 3 == 0 ? 50.0 : 1.0);
  EXPECT_TRUE(trial.is_used());
}

TEST(CompiledTrial, OneDifferenceIsFinalWheneverItComes) {
  for (size_t equal = 0; equal < CompiledTrial::kWarmups + CompiledTrial::kTimed + 3; ++equal) {
    CompiledTrial trial;
    for (size_t batch = 0; batch < equal; ++batch) trial.note(true, 2.0, 1.0);
    trial.note(false, 2.0, 1.0);
    EXPECT_TRUE(trial.is_refused());
    trial.note(true, 2.0, 1.0);
    EXPECT_EQ(trial.next(), Choice::kExecutor) << equal;
  }
}

TEST(CompiledTrial, WhatIsUsedIsComparedNowAndThen) {
  CompiledTrial trial = tried(2.0, 1.0);
  for (int round = 0; round < 3; ++round) {
    for (uint64_t batch = 1; batch < CompiledTrial::kCompareEvery; ++batch) EXPECT_EQ(trial.next(), Choice::kCompiled);
    EXPECT_EQ(trial.next(), Choice::kBoth);
    trial.note(true, 2.0, 5.0);  // a slow one changes nothing any more
  }
  EXPECT_TRUE(trial.is_used());
}

}  // namespace
}  // namespace penstock::runtime
