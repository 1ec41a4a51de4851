// SPDX-License-Identifier: Apache-2.0
// How a warm process begins; job_host_test.cpp has the rest. Against warm_main.cpp.
#include "server/warm_process.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "warm_jobs.h"
#include "wire/reports.h"

namespace penstock::server {
namespace {

using std::chrono::minutes;
using std::chrono::steady_clock;

std::unique_ptr<WarmProcess> started(const std::string& word) {
  return WarmProcess::start({PENSTOCK_TEST_BINARY_DIR "/warm_main", word}).value();
}

Result<WarmFacts> facts_of(const std::string& word) {
  return started(word)->wait_until_ready(steady_clock::now() + minutes(1));
}

TEST(WarmProcess, TellsOfItselfOnceItIsReady) {
  const auto facts = facts_of("forks");
  ASSERT_TRUE(facts) << facts.error().message;
  EXPECT_EQ(facts.value().numerics, (Numerics{1, 2, 3}));
  EXPECT_EQ(facts.value().torch, 0x020f);
  EXPECT_EQ(facts.value().job_kinds, wire::kind_bit(wire::JobKind::kPlugin));
  EXPECT_EQ(facts.value().about, "a warm process of tests");
}

TEST(WarmProcess, ThatIsNotReadyIsATimeoutAndMayBeWaitedForAgain) {
  const auto warm = started("is_never_ready");
  for (int round = 0; round < 2; ++round) {
    const auto facts = warm->wait_until_ready(steady_clock::now() - minutes(1));
    ASSERT_FALSE(facts);
    EXPECT_EQ(facts.error().code, Errc::kTimeout);
  }
}

TEST(WarmProcess, ThatEndsBeforeItIsReadyIsClosedAndSaysHow) {
  const auto facts = facts_of("ends_at_once");
  ASSERT_FALSE(facts);
  EXPECT_EQ(facts.error().code, Errc::kClosed);
  EXPECT_NE(facts.error().message.find("ended with exit code 9"), std::string::npos) << facts.error().message;
}

TEST(WarmProcess, ThatBeginsWithSomethingElseIsMalformed) {
  const auto facts = facts_of("begins_wrongly");
  ASSERT_FALSE(facts);
  EXPECT_EQ(facts.error().code, Errc::kMalformed);
}

TEST(WarmProcess, OfAnotherVersionIsAMismatchThatNamesBoth) {
  const auto facts = facts_of("begins_in_another_version");
  ASSERT_FALSE(facts);
  EXPECT_EQ(facts.error().code, Errc::kMismatch);
  for (const int version : {wire::kJobVersion + 8, int{wire::kJobVersion}}) {
    EXPECT_NE(facts.error().message.find("version " + std::to_string(version)), std::string::npos)
        << facts.error().message;
  }
}

TEST(WarmProcess, OfAProgramThatIsNotThereCannotBeStarted) {
  const auto warm = WarmProcess::start({PENSTOCK_TEST_BINARY_DIR "/no_such_program"});
  ASSERT_FALSE(warm);
  EXPECT_NE(warm.error().message.find("no_such_program"), std::string::npos) << warm.error().message;
}

}  // namespace
}  // namespace penstock::server
