// SPDX-License-Identifier: Apache-2.0
#include "simulator/trainer_meter.h"

#include <gtest/gtest.h>

namespace penstock::simulator {
namespace {

TEST(TrainerMeter, TellsOfWholeBatchesAlone) {
  TrainerMeter meter;
  meter.advance(2.5, {.batches_per_s = 1, .step_s = 0.25, .worker_s = 4});
  const wire::QueueSignal queue = meter.report(8).queue;
  EXPECT_EQ(queue.step_count, 2U);
  EXPECT_EQ(queue.made_batches, 2U);
  EXPECT_EQ(queue.stepping_ns, 500'000'000U);
  EXPECT_EQ(queue.starved_ns, 1'500'000'000U);
  EXPECT_EQ(queue.made_ns, 8'000'000'000U);
  EXPECT_EQ(queue.ready_batches, 0U);
}

TEST(TrainerMeter, TheTimeBeforeTheFirstBatchIsAPause) {
  TrainerMeter meter;
  meter.advance(10, {.step_s = 1, .worker_s = 1});
  EXPECT_EQ(meter.report(8).queue.starved_ns, 0U);
}

// A pace that changed in the middle of a batch made the totals go back, which began the job's history anew.
TEST(TrainerMeter, TotalsNeverGoBack) {
  TrainerMeter meter;
  meter.advance(10.9, {.batches_per_s = 1, .step_s = 1, .worker_s = 1});
  const wire::QueueSignal before = meter.report(8).queue;
  meter.advance(0.001, {.batches_per_s = 0.01, .step_s = 1, .worker_s = 50});
  const wire::QueueSignal after = meter.report(8).queue;
  EXPECT_GE(after.starved_ns, before.starved_ns);
  EXPECT_GE(after.stepping_ns, before.stepping_ns);
  EXPECT_GE(after.made_ns, before.made_ns);
}

}  // namespace
}  // namespace penstock::simulator
