// SPDX-License-Identifier: Apache-2.0
#include "sampling/mixture_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>

namespace penstock::sampling {
namespace {

// The largest |lag| that a schedule had, in samples.
double worst_error(MixtureSchedule& schedule, int sample_count) {
  int64_t worst = 0;
  for (int n = 0; n < sample_count; ++n) {
    schedule.next();
    for (const int64_t lag : schedule.lags()) worst = std::max(worst, std::abs(lag));
  }
  return static_cast<double>(worst) / MixtureSchedule::kWhole;
}

TEST(MixtureSchedule, EverySourceKeepsToItsShareAtEveryPrefix) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<double> weights(1 + random() % 12);
    for (double& weight : weights) weight = std::exp2(-static_cast<double>(random() % 12)) * (1 + random() % 100);
    MixtureSchedule schedule(MixtureSchedule::shares_of(weights));
    const auto source_count = static_cast<double>(weights.size());
    const double bound = weights.size() == 1 ? 0 : 1 - 1 / (2 * source_count - 2);
    EXPECT_LE(worst_error(schedule, 2000), bound) << "round " << round;
  }
}

TEST(MixtureSchedule, SharesAreTheWeightsAndAddUp) {
  const auto shares = MixtureSchedule::shares_of(std::vector<double>{3, 0, 1});
  EXPECT_EQ(shares, (std::vector<int64_t>{MixtureSchedule::kWhole / 4 * 3, 0, MixtureSchedule::kWhole / 4}));
  for (const std::vector<double>& weights :
       {std::vector<double>{1, 1, 1}, {1e308, 1e308, 1e-308}, {5e-324, 5e-324}, {0.1, 0.2, 0.7}}) {
    const auto found = MixtureSchedule::shares_of(weights);
    EXPECT_EQ(std::accumulate(found.begin(), found.end(), int64_t{0}), MixtureSchedule::kWhole);
    EXPECT_TRUE(std::ranges::all_of(found, [](int64_t share) { return share > 0; }));
  }
}

TEST(MixtureSchedule, ASourceWithoutWeightGivesNothing) {
  MixtureSchedule schedule(MixtureSchedule::shares_of(std::vector<double>{0, 1, 0, 2}));
  std::vector<int> counts(4);
  for (int n = 0; n < 300; ++n) ++counts[schedule.next()];
  EXPECT_EQ(counts, (std::vector<int>{0, 100, 0, 200}));
}

TEST(MixtureSchedule, GoesOnFromItsLags) {
  MixtureSchedule whole(MixtureSchedule::shares_of(std::vector<double>{0.2, 0.3, 0.5}));
  for (int n = 0; n < 17; ++n) whole.next();
  MixtureSchedule resumed(whole.shares(), whole.lags());
  for (int n = 0; n < 100; ++n) ASSERT_EQ(resumed.next(), whole.next());
}

TEST(MixtureSchedule, OneSourceGivesEverything) {
  MixtureSchedule schedule(MixtureSchedule::shares_of(std::vector<double>{7}));
  for (int n = 0; n < 10; ++n) EXPECT_EQ(schedule.next(), 0U);
}

}  // namespace
}  // namespace penstock::sampling
