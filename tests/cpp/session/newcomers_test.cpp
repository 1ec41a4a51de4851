// SPDX-License-Identifier: Apache-2.0
#include "session/newcomers.h"

#include <gtest/gtest.h>

namespace penstock::session {
namespace {

using std::chrono::seconds;

class NewcomersTest : public testing::Test {
 protected:
  int come(const std::string& key_name, int count) {
    int taken_count = 0;
    for (int index = 0; index < count; ++index) taken_count += newcomers_.take(key_name, now_) ? 1 : 0;
    return taken_count;
  }

  Instant now_{};
  Newcomers newcomers_;
};

TEST_F(NewcomersTest, ManyMayComeAtOnceAndThenSoManyASecond) {
  constexpr int kMany = 2 * static_cast<int>(kNewcomersAtOnce);
  EXPECT_EQ(come("the user mallory", kMany), static_cast<int>(kNewcomersAtOnce));
  for (int second = 0; second < 5; ++second) {
    now_ += seconds(1);
    EXPECT_EQ(come("the user mallory", kMany), static_cast<int>(kNewcomersPerSecond));
  }
  now_ += seconds(3600);
  EXPECT_EQ(come("the user mallory", kMany), static_cast<int>(kNewcomersAtOnce)) << "no more are saved up";
}

TEST_F(NewcomersTest, KeysDoNotTakeEachOthersTurns) {
  come("the user mallory", 5000);
  EXPECT_EQ(come("the role trainer", 3), 3);
}

}  // namespace
}  // namespace penstock::session
