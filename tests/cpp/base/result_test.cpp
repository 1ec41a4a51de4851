// SPDX-License-Identifier: Apache-2.0
#include "base/result.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

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
  EXPECT_NE(message.find("result_test.cpp:"), std::string::npos) << message;
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

const Fault kLate{Errc::kTimeout, "nothing came within 5 ms"};

TEST(Result, HoldsAValue) {
  Result<std::string> result = std::string("batch");
  ASSERT_TRUE(result);
  EXPECT_EQ(result.value(), "batch");
  result.value() += "es";
  EXPECT_EQ(std::as_const(result).value(), "batches");
}

TEST(Result, HoldsAnError) {
  const Result<std::string> result = kLate;
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error(), kLate);
}

// A result is asked with `if (result)`, which must not mean the value.
TEST(Result, OfFalseIsASuccess) {
  const Result<bool> no = false;
  ASSERT_TRUE(no);
  EXPECT_FALSE(no.value());
}

TEST(Result, MovesOutWhatCannotBeCopied) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(7);
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 7);
}

TEST(Result, ReadingTheValueOfAFailureAssertsWithItsMessage) {
  Result<int> result = kLate;
  try {
    static_cast<void>(result.value());
    FAIL() << "value() of a failure returned";
  } catch (const AssertionFailure& failure) {
    EXPECT_NE(std::string(failure.what()).find(kLate.message), std::string::npos) << failure.what();
  }
  EXPECT_THROW(static_cast<void>(std::as_const(result).value()), AssertionFailure);
  EXPECT_THROW(static_cast<void>(std::move(result).value()), AssertionFailure);
}

TEST(Result, ReadingTheErrorOfASuccessAsserts) {
  EXPECT_THROW(static_cast<void>(Result<int>(1).error()), AssertionFailure);
  EXPECT_THROW(static_cast<void>(Result<void>().error()), AssertionFailure);
}

TEST(Result, OfNothingIsSuccessOrAnError) {
  EXPECT_TRUE(Result<void>());
  const Result<void> failed = kLate;
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error(), kLate);
}

TEST(Result, IsNotSilentlyABoolOrANumber) {
  EXPECT_FALSE((std::is_convertible_v<Result<int>, bool>));
  EXPECT_FALSE((std::is_convertible_v<Result<void>, int>));
}

TEST(Errc, EveryCodeHasItsOwnName) {
  std::set<std::string_view> names;
  for (const Errc code : {Errc::kMalformed, Errc::kTooLarge, Errc::kTimeout, Errc::kClosed, Errc::kNoMemory,
                          Errc::kUnsupported, Errc::kMismatch, Errc::kFailed}) {
    EXPECT_TRUE(names.insert(errc_name(code)).second) << errc_name(code);
  }
  EXPECT_FALSE(names.contains(errc_name(static_cast<Errc>(255))));
}

}  // namespace
}  // namespace penstock
