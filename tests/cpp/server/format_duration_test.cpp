// SPDX-License-Identifier: Apache-2.0
#include "server/format_duration.h"

#include <gtest/gtest.h>

namespace penstock::server {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(FormatDuration, SecondsAreWhole) {
  EXPECT_EQ(format_duration(seconds(60)), "60 s");
  EXPECT_EQ(format_duration(milliseconds(1999)), "1 s");
}

TEST(FormatDuration, LessThanASecondIsInMilliseconds) {
  EXPECT_EQ(format_duration(microseconds(999'999)), "999 ms");
  EXPECT_EQ(format_duration(Duration(0)), "0 ms");
}

}  // namespace
}  // namespace penstock::server
