// SPDX-License-Identifier: Apache-2.0
#include "base/assert.h"

#include <gtest/gtest.h>

#include <string>

namespace penstock {
namespace {

// The text of an assertion that fails, or nothing when it holds.
std::string message_of(void (*body)()) {
  try {
    body();
  } catch (const AssertionFailure& failure) {
    return failure.what();
  }
  return "";
}

TEST(Assert, HoldingSaysNothing) {
  EXPECT_EQ(message_of([] { PENSTOCK_ASSERT(1 + 1 == 2, "arithmetic"); }), "");
}

TEST(Assert, FailingNamesTheConditionThePlaceAndTheParts) {
  const std::string message = message_of([] { PENSTOCK_ASSERT(1 + 1 == 3, "saw ", 2, " of ", std::string("3")); });
  EXPECT_NE(message.find("1 + 1 == 3"), std::string::npos) << message;
  EXPECT_NE(message.find("assert_test.cpp:"), std::string::npos) << message;
  EXPECT_NE(message.find("saw 2 of 3"), std::string::npos) << message;
  EXPECT_NE(message.find("issue tracker"), std::string::npos) << message;
}

TEST(Assert, NeedsNoParts) {
  EXPECT_NE(message_of([] { PENSTOCK_ASSERT(false); }), "");
}

TEST(Assert, PartsAreEvaluatedOnlyWhenItFails) {
  int evaluations = 0;
  PENSTOCK_ASSERT(true, ++evaluations);
  EXPECT_EQ(evaluations, 0);
}

TEST(Assert, IsOneStatement) {
  bool reached = false;
  if (false)
    PENSTOCK_ASSERT(false);
  else
    reached = true;
  EXPECT_TRUE(reached);
}

}  // namespace
}  // namespace penstock
