// SPDX-License-Identifier: Apache-2.0
#include "net/holder_budget.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace penstock::net {
namespace {

constexpr HolderBudget::Address kHere{1};
constexpr HolderBudget::Address kThere{2};

class HolderBudgetTest : public testing::Test {
 protected:
  // Connections that are let in, numbered from `first`. Returns who is closed for them.
  std::vector<int> let_in(int first, int count, const HolderBudget::Address& address = kHere) {
    std::vector<int> closed;
    for (int id = first; id < first + count; ++id) {
      budget_.add(id, address);
      close_surplus(id, closed);
    }
    return closed;
  }
  // The same of ones that send a message as soon as they are let in.
  std::vector<int> speak(const std::string& key, int first, int count) {
    std::vector<int> closed;
    for (int id = first; id < first + count; ++id) {
      budget_.add(id, kHere);
      close_surplus(id, closed);
      budget_.speak(id, key);
      close_surplus(id, closed);
    }
    return closed;
  }
  void close_surplus(int id, std::vector<int>& closed) {
    while (const auto surplus = budget_.surplus(id)) {
      closed.push_back(*surplus);
      budget_.remove(*surplus);
    }
  }

  HolderBudget budget_{{.known_count_max = 12, .key_count_max = 6, .quiet_count_max = 4, .quiet_address_count_max = 3}};
};

TEST_F(HolderBudgetTest, ThereIsRoomForAllUpToTheLimits) {
  EXPECT_EQ(speak("ann", 0, 6), std::vector<int>());
  EXPECT_EQ(speak("ben", 10, 6), std::vector<int>());
  EXPECT_EQ(let_in(20, 3), std::vector<int>());
  EXPECT_EQ(let_in(30, 1, kThere), std::vector<int>());
  EXPECT_EQ(budget_.count(), 16u);
}

TEST_F(HolderBudgetTest, KeyWithTooManyLosesItsOldest) {
  speak("ben", 0, 1);
  EXPECT_EQ(speak("mallory", 10, 8), (std::vector{10, 11}));
  EXPECT_TRUE(budget_.has(0));
}

TEST_F(HolderBudgetTest, KeyWithMostGivesWayWhenAllIsFull) {
  speak("ann", 0, 4);
  speak("mallory", 10, 6);
  EXPECT_EQ(speak("ben", 20, 4), (std::vector{10, 11}));
  EXPECT_EQ(speak("cho", 30, 1), (std::vector{0})) << "each has four, and this one came first of all";
}

TEST_F(HolderBudgetTest, ThatHasSentNothingCountsForItsAddress) {
  speak("ann", 0, 1);
  EXPECT_EQ(let_in(10, 5), (std::vector{10, 11}));
  EXPECT_EQ(let_in(20, 2, kThere), (std::vector{12})) << "the fullest address gives way";
  EXPECT_TRUE(budget_.has(0));
}

TEST_F(HolderBudgetTest, ThoseThatSendNothingFromManyAddressesCloseNoneThatHas) {
  EXPECT_EQ(speak("ann", 0, 6), std::vector<int>());
  EXPECT_EQ(speak("ben", 10, 6), std::vector<int>());
  for (uint8_t number = 1; number <= 100; ++number)
    EXPECT_EQ(let_in(100 + number, 1, {0, number}),
              number <= 4 ? std::vector<int>() : std::vector<int>{100 + number - 4});
}

TEST_F(HolderBudgetTest, ConnectionKeepsItsAgeWhenItSpeaks) {
  let_in(0, 1);
  speak("ann", 10, 5);
  budget_.speak(0, "ann");
  EXPECT_EQ(speak("ann", 20, 1), (std::vector{0}));
}

TEST_F(HolderBudgetTest, ThatSpeaksAgainIsOfTheKeyThatItSpokeWithLast) {
  speak("ann", 0, 5);
  speak("ben", 10, 1);
  budget_.speak(10, "ann");
  EXPECT_EQ(speak("ann", 20, 1), (std::vector{0}));
}

TEST_F(HolderBudgetTest, KeyWithOneConnectionIsNeverClosedHoweverManyAnotherHas) {
  speak("ann", 0, 1);
  for (int first = 10; first < 5010; first += 10) {
    speak("mallory", first, 5);
    let_in(first + 5, 5);
  }
  EXPECT_TRUE(budget_.has(0));
  EXPECT_LE(budget_.count(), 16u);
}

TEST(HolderRoom, FollowsFromTheDescriptorsThatAProcessMayHave) {
  const HolderRoom room{.count_max = 1000, .descriptors_for_each = 8};
  const auto count_under = [&room](uint64_t descriptor_limit) {
    const auto limits = HolderBudget::limits_under(descriptor_limit, room);
    return limits.known_count_max + limits.quiet_count_max;
  };
  EXPECT_EQ(count_under(1024), 128u);
  EXPECT_EQ(count_under(20), kHoldersLeast);
  const auto limits = HolderBudget::limits_under(uint64_t{1} << 20, room);
  EXPECT_EQ(limits.known_count_max, 750u);
  EXPECT_EQ(limits.key_count_max, 375u);
  EXPECT_EQ(limits.quiet_count_max, 250u);
  EXPECT_EQ(limits.quiet_address_count_max, 125u);
}

}  // namespace
}  // namespace penstock::net
