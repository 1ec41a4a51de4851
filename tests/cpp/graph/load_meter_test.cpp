// SPDX-License-Identifier: Apache-2.0
#include "graph/load_meter.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace penstock::graph {
namespace {

TEST(LoadMeter, TellsTheTrainersWorkFromWaitingAndAWorkersShare) {
  LoadMeter meter;
  meter.begin(2, 0);
  double now_s = 0;
  for (uint64_t k = 1; k < 12; ++k) {
    const auto count = static_cast<double>(k);
    meter.note(now_s, now_s + 0.25, {.batches = k, .with_boundary = k, .fetch_s = 3 * count, .prefix_s = count});
    now_s += 0.25 + 0.5;
  }
  const auto measured = meter.measured(/*needs_boundary=*/true, /*cpus=*/4);
  ASSERT_TRUE(measured);
  EXPECT_DOUBLE_EQ(measured->trainer_s, 0.5);
  EXPECT_DOUBLE_EQ(measured->fetch_s, 3);
  EXPECT_DOUBLE_EQ(measured->prefix_s, 1);
  EXPECT_DOUBLE_EQ(measured->step_s, 0.75);
  EXPECT_EQ(measured->workers, 2u);
  EXPECT_EQ(measured->cpus, 4u);
}

TEST(LoadMeter, LeavesOutOddStepsPausesBetweenEpochsAndBatchesUnderWay) {
  LoadMeter meter;
  const auto note = [&](double called_at_s, double returned_at_s, uint64_t batches, uint64_t with_boundary) {
    meter.note(called_at_s, returned_at_s,
               {.batches = batches, .with_boundary = with_boundary, .fetch_s = static_cast<double>(batches)});
  };
  meter.begin(1, 2);
  for (uint64_t k = 1; k < 4; ++k) note(static_cast<double>(k), static_cast<double>(k) + 0.5, k, 0);
  EXPECT_EQ(meter.step_count(), 1u) << "of the first batch it is not known what it took a worker";
  meter.skip();
  note(90, 91, 4, 0);
  EXPECT_EQ(meter.step_count(), 1u);
  meter.begin(1, 2);
  note(200, 201, 1, 0);
  EXPECT_EQ(meter.step_count(), 1u);
  note(201.5, 201.6, 2, 0);
  meter.forget();
  for (uint64_t k = 3; k < 6; ++k) note(200 + static_cast<double>(k), 200.5 + static_cast<double>(k), k, 1);
  EXPECT_EQ(meter.step_count(), 1u);
  EXPECT_FALSE(meter.measured(/*needs_boundary=*/true, 1)) << "it carried none";
}

TEST(LoadMeter, TheSlowerOfHostAndDeviceCounts) {
  LoadMeter meter;
  meter.begin(1, 0);
  for (uint64_t k = 1; k < 5; ++k) {
    const auto now_s = static_cast<double>(k);
    meter.note(now_s, now_s, {.batches = k});
    meter.note_device(3);
  }
  EXPECT_DOUBLE_EQ(meter.measured(false, 1)->trainer_s, 3);
}

TEST(LoadMeter, KeepsTheNewestStepsAlone) {
  LoadMeter meter;
  meter.begin(1, 0);
  for (uint64_t k = 1; k < 2 * LoadMeter::kStepsMax; ++k)
    meter.note(static_cast<double>(k), static_cast<double>(k), {k});
  EXPECT_EQ(meter.step_count(), LoadMeter::kStepsMax);
  EXPECT_TRUE(meter.has_seen(24, 1e9)) << "as many as are kept are enough";
}

TEST(MiddleMean, LeavesOutTheLongestAndTheShortest) {
  std::vector<double> values(9, 1.0);
  values.push_back(100);
  EXPECT_DOUBLE_EQ(middle_mean(values).mean, 1);
  EXPECT_DOUBLE_EQ(middle_mean({2}).mean, 2);
  EXPECT_TRUE(std::isinf(middle_mean({2}).error));
  EXPECT_DOUBLE_EQ(middle_mean({1, 3}).error, 1) << "the deviation is the root of 2, and so is that of the count";
}

}  // namespace
}  // namespace penstock::graph
