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

std::vector<double> random_weights(std::mt19937& random) {
  std::vector<double> weights(1 + random() % 9);
  for (double& weight : weights) weight = random() % 5 == 0 ? 0 : std::exp2(-static_cast<double>(random() % 9));
  if (random() % 2 == 0)
    for (double& weight : weights) weight *= 1 + random() % 100;
  weights[random() % weights.size()] = 1;
  return weights;
}

TEST(MixtureSchedule, APlaceIsFoundWithoutTheSamplesBeforeIt) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const auto shares = MixtureSchedule::shares_of(random_weights(random));
    MixtureSchedule walked(shares);
    for (int64_t count = 0; count < 3000; ++count) {
      if (random() % 64 == 0) {
        ASSERT_EQ(MixtureSchedule::after(shares, count), walked) << "round " << round << ", after " << count;
      }
      walked.next();
    }
  }
}

TEST(MixtureSchedule, TheEndOfASourceIsFoundWithoutTheSamplesBeforeIt) {
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    const auto shares = MixtureSchedule::shares_of(random_weights(random));
    std::vector<int64_t> lengths(shares.size());
    for (size_t source = 0; source < shares.size(); ++source)
      if (shares[source] > 0) lengths[source] = 1 + static_cast<int64_t>(random() % 300);
    MixtureSchedule walked(shares);
    std::vector<int64_t> counts(shares.size());
    int64_t expected = 0;
    for (size_t source = walked.next(); counts[source] < lengths[source]; source = walked.next(), ++expected)
      ++counts[source];
    ASSERT_EQ(MixtureSchedule::samples_until_end(shares, lengths), expected) << "round " << round;
  }
}

TEST(MixtureSchedule, TheEndOfLongSourcesIsFoundAtOnce) {
  const auto shares = MixtureSchedule::shares_of(std::vector<double>{1, 2, 5});
  const int64_t length = int64_t{1} << 60;
  EXPECT_EQ(MixtureSchedule::samples_until_end(shares, std::vector<int64_t>{length, length, 5 * (length / 8)}), length);
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
