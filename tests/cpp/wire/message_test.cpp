// SPDX-License-Identifier: Apache-2.0
#include "wire/message.h"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>

namespace penstock::wire {
namespace {

using std::chrono::seconds;

TEST(BatchFacts, ATimeStopsAtTheLargestNumber) {
  EXPECT_EQ(time_units(std::chrono::microseconds(1)), 10u);
  EXPECT_EQ(time_units(std::chrono::nanoseconds(-5)), 0u);
  EXPECT_EQ(time_units(std::chrono::hours(1)), std::numeric_limits<uint32_t>::max());
}

TEST(BatchFacts, AShareOfATimeIsKnownUnlessThereIsNone) {
  EXPECT_EQ(share_units(seconds(1), seconds(1)), kShareUnit);
  EXPECT_EQ(share_units(seconds(2), seconds(1)), kShareUnit);
  EXPECT_EQ(share_units(std::chrono::nanoseconds(1), seconds(1)), 1u);
  EXPECT_EQ(share_units(seconds(0), seconds(1)), 0u);
  EXPECT_EQ(share_units(seconds(1), seconds(0)), 0u);
}

}  // namespace
}  // namespace penstock::wire
