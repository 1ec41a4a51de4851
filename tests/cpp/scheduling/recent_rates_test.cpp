// SPDX-License-Identifier: Apache-2.0
#include "scheduling/recent_rates.h"

#include <gtest/gtest.h>

namespace penstock::scheduling {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class RecentRatesTest : public testing::Test {
 protected:
  // A report `after` the last one.
  void note(Duration after, uint64_t delivered_batches, Duration waited = {}) {
    now_ += after;
    rates_.note({.waited_ns = static_cast<uint64_t>(waited.count()), .delivered_batches = delivered_batches}, now_);
  }

  Instant now_{};
  RecentRates rates_;
};

TEST_F(RecentRatesTest, NothingIsKnownBeforeASecondOfReports) {
  EXPECT_EQ(rates_.batches_per_s(), std::nullopt);
  note({}, 0);
  EXPECT_EQ(rates_.batches_per_s(), std::nullopt);
  note(milliseconds(999), 50);
  EXPECT_EQ(rates_.batches_per_s(), std::nullopt);
  EXPECT_EQ(rates_.waited_share(), std::nullopt);
}

TEST_F(RecentRatesTest, RatesAreThoseOfTheTimeBetweenReports) {
  note({}, 100, seconds(7));
  for (int half = 1; half <= 4; ++half) note(milliseconds(500), 100 + 10 * half, seconds(7) + milliseconds(125) * half);
  EXPECT_DOUBLE_EQ(rates_.batches_per_s().value(), 20.0);
  EXPECT_DOUBLE_EQ(rates_.waited_share().value(), 0.25);
}

TEST_F(RecentRatesTest, WhatWasBeforeTheWindowIsForgotten) {
  note({}, 0);
  for (int second = 1; second <= 5; ++second) note(seconds(1), 1000 * second);
  for (int second = 1; second <= 11; ++second) note(seconds(1), 5000);
  EXPECT_DOUBLE_EQ(rates_.batches_per_s().value(), 0.0);
}

TEST_F(RecentRatesTest, ATrainerThatCountsAnewHasNoRateOfBefore) {
  note({}, 1000, seconds(9));
  note(seconds(5), 2000, seconds(9));
  note(milliseconds(500), 3);
  EXPECT_EQ(rates_.batches_per_s(), std::nullopt);
  note(seconds(2), 7);
  EXPECT_DOUBLE_EQ(rates_.batches_per_s().value(), 2.0);
}

TEST_F(RecentRatesTest, ReportsWithoutPauseGiveTheSameRate) {
  note({}, 0);
  for (uint64_t count = 1; count <= 200'000; ++count) note(std::chrono::microseconds(100), count);
  EXPECT_NEAR(rates_.batches_per_s().value(), 10'000.0, 1.0);
}

TEST_F(RecentRatesTest, NobodyWaitsForMoreThanAllTheTime) {
  note({}, 0);
  note(seconds(1), 0, seconds(3));
  EXPECT_DOUBLE_EQ(rates_.waited_share().value(), 1.0);
}

}  // namespace
}  // namespace penstock::scheduling
