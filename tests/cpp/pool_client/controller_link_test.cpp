// SPDX-License-Identifier: Apache-2.0
#include "pool_client/controller_link.h"

#include <gtest/gtest.h>

#include <chrono>

namespace penstock::pool_client {
namespace {

using std::chrono::seconds;

constexpr char kWhere[] = "tcp://alpha:7000";

void expect_reported(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << text;
}

TEST(PoolStanding, ControllerThatNeverAnsweredIsToBeStarted) {
  PoolStanding standing(wire::JobKind::kPython);
  standing.note({.time_since_answer = seconds(7)}, 0, 0);
  expect_reported(standing.describe(kWhere), "no controller answered at tcp://alpha:7000 within 7 s");
  expect_reported(standing.describe(kWhere), "penstock controller --bind tcp://alpha:7000");
  EXPECT_FALSE(standing.time_since_controller());
}

// The user was told to start a controller at an address with a typing mistake in it.
TEST(PoolStanding, NameThatNobodyKnowsIsTold) {
  PoolStanding standing(wire::JobKind::kPython);
  standing.note({.lookup_failure = "Name or service not known"}, 0, 0);
  const std::string text = standing.describe(kWhere);
  expect_reported(text, "no address is known for this name (Name or service not known)");
  EXPECT_EQ(text.find("start"), std::string::npos) << text;
}

// The user was told to start workers, or that no controller had answered, when the controller had died.
TEST(PoolStanding, ControllerThatAnsweredAndIsSilentIsNotTakenForOneThatNeverWas) {
  PoolStanding standing(wire::JobKind::kPython);
  standing.note({.has_answered = true, .time_since_answer = seconds(12)}, 2, 1);
  const std::string text = standing.describe(kWhere);
  expect_reported(text, "the controller at tcp://alpha:7000 last answered 12 s ago");
  expect_reported(text, "1 of 2 workers from it work for this trainer");
  EXPECT_EQ(standing.time_since_controller(), seconds(12));
  standing.note({.has_answered = true, .time_since_answer = seconds(12)}, 0, 0);
  EXPECT_EQ(standing.describe(kWhere).find("penstock worker"), std::string::npos);
}

// The user was told to start workers, and not that the batch had ended all that there were.
TEST(PoolStanding, BatchThatTheLastWorkersDiedOfIsNamedFirst) {
  PoolStanding standing(wire::JobKind::kPython);
  standing.note({.has_answered = true}, 0, 0);
  standing.note_deaths("1 worker died while making batch 9");
  EXPECT_EQ(standing.describe(kWhere).rfind("1 worker died while making batch 9; since then the controller at ", 0), 0u)
      << standing.describe(kWhere);
  expect_reported(standing.describe(kWhere), "has no worker for this trainer: start some");
  EXPECT_EQ(standing.describe("").rfind("1 worker died while making batch 9; since then 0 of 0 workers", 0), 0u)
      << standing.describe("");
  standing.note_deaths("");
  EXPECT_EQ(standing.describe(kWhere).rfind("the controller at ", 0), 0u) << standing.describe(kWhere);
}

TEST(PoolStanding, ControllerThatAnswersSaysHowManyWorkersThereAre) {
  PoolStanding standing(wire::JobKind::kPython);
  standing.note({.has_answered = true, .time_since_answer = seconds(1)}, 0, 0);
  expect_reported(standing.describe(kWhere), "has no worker for this trainer: start some");
  standing.note({.has_answered = true, .time_since_answer = seconds(1)}, 2, 1);
  expect_reported(standing.describe(kWhere),
                  "1 of 2 workers from the controller at tcp://alpha:7000 works for this trainer");
}

// The user of a plug-in was told to start `penstock worker`, whose workers declined the job, and training failed.
TEST(PoolStanding, WorkersToStartAreOfTheKindOfTheJob) {
  PoolStanding python(wire::JobKind::kPython);
  PoolStanding plugin(wire::JobKind::kPlugin);
  for (PoolStanding* standing : {&python, &plugin}) standing->note({.has_answered = true}, 0, 0);
  expect_reported(python.describe(kWhere), "start some (penstock worker --controller tcp://alpha:7000)");
  expect_reported(plugin.describe(kWhere), "start some (penstock-worker --controller tcp://alpha:7000)");
  plugin.note_pool(1, 1);
  expect_reported(plugin.describe_declined(kWhere), "start some (penstock-worker --controller tcp://alpha:7000)");
}

TEST(PoolStanding, FewReasonsAreSpokenAndALimitedNumberKept) {
  PoolStanding standing(wire::JobKind::kPython);
  for (uint64_t id = 1; id <= 2 * kRefusalCountMax; ++id) standing.note_refusal(id, "no room");
  const std::string text = standing.describe_declined(kWhere);
  expect_reported(text, "and " + std::to_string(kRefusalCountMax - kRefusalListedCountMax) + " more");
  EXPECT_EQ(text.find("worker 0000000000000001:"), std::string::npos) << text;
}

TEST(PoolStanding, ReasonOfTheWorkerItselfIsKept) {
  PoolStanding standing(wire::JobKind::kPython);
  EXPECT_TRUE(standing.note_reported_refusal(7, "no module named 'im"));
  EXPECT_FALSE(standing.note_reported_refusal(7, "no module named 'im"));
  EXPECT_TRUE(standing.note_refusal(7, "no module named 'images'"));
  EXPECT_FALSE(standing.note_reported_refusal(7, "no module named 'im"));
  expect_reported(standing.describe_declined(kWhere), "worker 0000000000000007: no module named 'images'");
}

}  // namespace
}  // namespace penstock::pool_client
