// SPDX-License-Identifier: Apache-2.0
#include "loader/inbox.h"

#include <gtest/gtest.h>

#include <string>

namespace penstock::loader {
namespace {

void tell(Inbox& inbox, const std::string& text) {
  inbox.arrive({.kind = Arrival::Kind::kNews, .batch = {}, .error = Fault{Errc::kFailed, text}});
}

// Peers could fill the memory of a trainer that was busy with a step.
TEST(Inbox, NewsBeyondTheLimitIsDroppedAndTheLastOneSaysSo) {
  Inbox inbox(1 << 20);
  for (size_t count = 0; count < 3 * kNewsCountMax; ++count) tell(inbox, "news " + std::to_string(count));
  ASSERT_EQ(inbox.arrival_count(), kNewsCountMax);
  std::string last;
  for (size_t count = 0; count < kNewsCountMax; ++count) {
    const auto arrival = inbox.try_pop();
    ASSERT_TRUE(arrival);
    if (count + 1 < kNewsCountMax) {
      EXPECT_EQ(arrival->error->message, "news " + std::to_string(count));
    }
    last = arrival->error->message;
  }
  EXPECT_NE(last.find("the remaining ones were dropped"), std::string::npos) << last;
  EXPECT_FALSE(inbox.try_pop());
  tell(inbox, "more");
  EXPECT_EQ(inbox.try_pop()->error->message, "more");
}

TEST(Inbox, NewsCountsWhileItWaitsOverTheBeginningOfAnEpoch) {
  Inbox inbox(1 << 20);
  for (size_t count = 0; count < kNewsCountMax; ++count) tell(inbox, "news");
  inbox.set_epochs(1, 1);
  tell(inbox, "one too many");
  EXPECT_EQ(inbox.arrival_count(), kNewsCountMax);
}

TEST(Inbox, GrowthIsToldOnceUntilItIsRead) {
  Inbox inbox(1 << 20);
  const auto grow = [&] { inbox.arrive({.kind = Arrival::Kind::kGrown, .batch = {}, .error = {}}); };
  for (int count = 0; count < 1000; ++count) grow();
  EXPECT_EQ(inbox.try_pop()->kind, Arrival::Kind::kGrown);
  EXPECT_FALSE(inbox.try_pop());
  grow();
  EXPECT_TRUE(inbox.try_pop());
}

}  // namespace
}  // namespace penstock::loader
