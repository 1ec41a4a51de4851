// SPDX-License-Identifier: Apache-2.0
#include "scheduling/worker_choice.h"

#include <gtest/gtest.h>

namespace penstock::scheduling {
namespace {

constexpr uint64_t kOwner = 7;

// A stretch of `count` batches, each of which takes the trainer `trainer_s` and is waited for `wait_s`.
void run_stretch(StallMeter& meter, uint32_t workers, int count, double trainer_s, double wait_s, double worker_s) {
  double now_s = 100;
  meter.begin(kOwner, workers, {.batches = 5, .ready = 1, .wait_s = 3, .fetch_s = 9}, {.workers_s = 2, .trainer_s = 4},
              now_s);
  for (int batch = 0; batch < count; ++batch) {
    const double called_at_s = now_s + trainer_s;
    now_s = called_at_s + wait_s;
    meter.note(called_at_s, now_s);
  }
  meter.end({.batches = 5 + static_cast<uint64_t>(count),
             .ready = 1,
             .wait_s = 3 + count * wait_s,
             .fetch_s = 9 + count * worker_s},
            {.workers_s = 2 + count * worker_s / 2, .trainer_s = 4 + count * trainer_s});
}

TEST(StallMeter, TakesTheMeansOfAStretch) {
  StallMeter meter;
  run_stretch(meter, 3, 100, 0.02, 0.01, 0.08);
  EXPECT_TRUE(meter.has_seen(2.9, 100));
  EXPECT_FALSE(meter.has_seen(3.1, 100));
  const MeasuredWork measured = meter.take();
  EXPECT_EQ(measured.workers, 3u);
  EXPECT_NEAR(measured.trainer_s, 0.02, 1e-9);
  EXPECT_NEAR(measured.wait_s, 0.01, 1e-9);
  EXPECT_NEAR(measured.worker_s, 0.08, 1e-9);
  EXPECT_NEAR(measured.cpu_share.value(), 0.5, 1e-9);
  EXPECT_NEAR(measured.trainer_cpus, 2.0 / 3, 1e-9);
  EXPECT_FALSE(meter.has_seen(0, 1)) << "what was taken is forgotten";
}

TEST(StallMeter, APauseIsNoBatchsTime) {
  StallMeter meter;
  meter.begin(kOwner, 1, {}, {}, 0);
  double now_s = 0;
  for (int batch = 0; batch < 9; ++batch) {
    now_s += 0.01;
    meter.note(now_s, now_s);
  }
  meter.note(now_s + 60, now_s + 60);  // a validation
  meter.end({.batches = 10}, {});
  EXPECT_NEAR(meter.take().trainer_s, (9 * 0.01 + 0.1) / 10, 1e-9);
}

TEST(StallMeter, AStretchThatAnotherOneInterruptsIsForgotten) {
  StallMeter meter;
  run_stretch(meter, 2, 50, 0.02, 0, 0.01);
  meter.begin(kOwner, 2, {}, {}, 0);
  meter.begin(kOwner + 1, 2, {}, {}, 0);
  EXPECT_FALSE(meter.is_open(kOwner));
  EXPECT_TRUE(meter.is_open(kOwner + 1));
  EXPECT_FALSE(meter.has_seen(0, 1));
}

TEST(StallMeter, WithoutCpuTimesTheShareIsUnknown) {
  StallMeter meter;
  meter.begin(kOwner, 1, {}, {}, 0);
  meter.note(0.5, 0.5);
  meter.end({.batches = 1, .fetch_s = 1}, {});
  EXPECT_FALSE(meter.take().cpu_share);
}

TEST(WorkerTuner, LooksLessOftenWhereTheNumberStays) {
  WorkerTuner tuner(1.0);
  run_stretch(tuner.meter(), 1, 100, 0.02, 0, 0.01);  // 2 s
  ASSERT_TRUE(tuner.is_due(1));
  EXPECT_EQ(tuner.choose(WorkerLimits::of(8)).workers, 1u);
  run_stretch(tuner.meter(), 1, 90, 0.02, 0, 0.01);
  EXPECT_FALSE(tuner.is_due(1)) << "the window is 2 s now";
  run_stretch(tuner.meter(), 1, 90, 0.02, 0, 0.01);
  EXPECT_TRUE(tuner.is_due(1));
}

TEST(WorkerTuner, WhatCouldNotBeStartedIsNotTriedAtOnceAgain) {
  WorkerTuner tuner(1.0);
  run_stretch(tuner.meter(), 2, 100, 0.001, 0.05, 0.1);
  EXPECT_EQ(tuner.choose(WorkerLimits::of(8)).workers, 4u);
  tuner.give_up(2);
  run_stretch(tuner.meter(), 2, 100, 0.001, 0.05, 0.1);
  const WorkerChoice& choice = tuner.choose(WorkerLimits::of(8));
  EXPECT_EQ(choice.workers, 2u);
  EXPECT_EQ(choice.reason, WorkerChoice::Reason::kNoGain);
}

}  // namespace
}  // namespace penstock::scheduling
