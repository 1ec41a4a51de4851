// SPDX-License-Identifier: Apache-2.0
#include "net/connection_budget.h"

#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <vector>

namespace penstock::net {
namespace {

using std::chrono::milliseconds;

constexpr ConnectionBudget::Address kAnn{1};
constexpr ConnectionBudget::Address kBen{2};
constexpr ConnectionBudget::Address kCho{3};
constexpr Instant kStart{};

class ConnectionBudgetTest : public testing::Test {
 protected:
  // Connections of an address, a millisecond after one another, numbered from `first`.
  void add(const ConnectionBudget::Address& address, int first, int count) {
    for (int id = first; id < first + count; ++id) budget_.add(id, address, now_ += milliseconds(1));
  }
  // Who is closed until there is room for all others.
  std::vector<int> closed() {
    std::vector<int> ids;
    while (const auto id = budget_.surplus()) {
      ids.push_back(*id);
      budget_.remove(*id);
    }
    return ids;
  }

  Instant now_ = kStart;
  ConnectionBudget budget_{{.stage_count_max = 8, .address_count_max = 4}};
};

TEST_F(ConnectionBudgetTest, ThereIsRoomForAllUpToTheLimits) {
  add(kAnn, 0, 4);
  add(kBen, 10, 4);
  EXPECT_EQ(budget_.surplus(), std::nullopt);
}

TEST_F(ConnectionBudgetTest, OldestOfAnAddressWithTooManyGoes) {
  add(kBen, 10, 1);
  add(kAnn, 0, 6);
  EXPECT_EQ(closed(), (std::vector{0, 1}));
}

TEST_F(ConnectionBudgetTest, FullestAddressGivesWayWhenAllIsFull) {
  add(kBen, 10, 3);
  add(kAnn, 0, 4);
  add(kCho, 20, 2);
  EXPECT_EQ(closed(), (std::vector{0}));
  add(kCho, 22, 1);  // now each has three, and Ben's first came first of all
  EXPECT_EQ(closed(), (std::vector{10}));
}

TEST_F(ConnectionBudgetTest, StrangersOfManyAddressesLeaveRoomForEachNewOne) {
  for (uint8_t number = 1; number <= 100; ++number) {
    budget_.add(number, {0, number}, now_ += milliseconds(1));
    const auto gone = closed();
    EXPECT_EQ(gone, number <= 8 ? std::vector<int>() : std::vector<int>{number - 8});
  }
}

TEST_F(ConnectionBudgetTest, StageHasRoomOfItsOwn) {
  add(kAnn, 0, 4);
  budget_.advance(0, HandshakeStage::kGreeting);
  budget_.advance(1, HandshakeStage::kKnowing);
  add(kAnn, 10, 40);
  const auto gone = closed();
  EXPECT_EQ(gone.size(), 38u);
  EXPECT_EQ(gone.front(), 2);
  EXPECT_EQ(budget_.stage_of(0), HandshakeStage::kGreeting);
  EXPECT_EQ(budget_.stage_of(1), HandshakeStage::kKnowing);
  EXPECT_EQ(budget_.stage_of(49), HandshakeStage::kSilent);
}

TEST_F(ConnectionBudgetTest, OneThatHasGoneOnIsLastInItsNewStage) {
  add(kAnn, 0, 5);
  for (const int id : {1, 2, 3, 4, 0}) budget_.advance(id, HandshakeStage::kGreeting);
  EXPECT_EQ(closed(), (std::vector{1}));
}

TEST_F(ConnectionBudgetTest, SilentOnesGoFirstWhereAnyMustGo) {
  EXPECT_EQ(budget_.first(), std::nullopt);
  add(kAnn, 0, 2);
  budget_.advance(0, HandshakeStage::kGreeting);
  EXPECT_EQ(budget_.first(), 1);
  budget_.remove(1);
  EXPECT_EQ(budget_.first(), 0);
  budget_.remove(0);
  EXPECT_TRUE(budget_.is_empty());
  EXPECT_FALSE(budget_.has(0));
}

TEST_F(ConnectionBudgetTest, EachStageHasATime) {
  for (const int id : {0, 1, 2}) budget_.add(id, kAnn, kStart);
  budget_.advance(1, HandshakeStage::kGreeting);
  budget_.advance(2, HandshakeStage::kKnowing);
  EXPECT_EQ(budget_.overdue(kStart + kStageTimes[0] - milliseconds(1)), std::vector<int>());
  EXPECT_EQ(budget_.overdue(kStart + kStageTimes[0]), (std::vector{0}));
  EXPECT_EQ(budget_.overdue(kStart + kStageTimes[1]), (std::vector{0, 1}));
  EXPECT_EQ(budget_.overdue(kStart + kStageTimes[2]), (std::vector{0, 1, 2}));
}

TEST_F(ConnectionBudgetTest, TimeIsHalvedWhileMostOfTheRoomIsTaken) {
  const Instant half = kStart + kStageTimes[0] / 2;
  for (const int id : {0, 1, 2, 3}) budget_.add(id, kAnn, kStart);
  for (const int id : {10, 11}) budget_.add(id, kBen, half);
  EXPECT_EQ(budget_.overdue(half), std::vector<int>());
  budget_.add(12, kBen, half);
  EXPECT_EQ(budget_.overdue(half), (std::vector{0, 1, 2, 3}));
}

TEST(ConnectionBudgetLimits, FollowFromTheDescriptorsOfTheProcess) {
  const auto limits = [](uint64_t descriptors, size_t sharer_count = 1) {
    const auto found = ConnectionBudget::limits_under(descriptors, sharer_count);
    return std::vector{found.stage_count_max, found.address_count_max};
  };
  EXPECT_EQ(limits(16), (std::vector<size_t>{4, 2}));
  EXPECT_EQ(limits(256), (std::vector<size_t>{16, 8}));
  EXPECT_EQ(limits(1024), (std::vector<size_t>{64, 32}));
  EXPECT_EQ(limits(4096), (std::vector<size_t>{128, 64}));
  EXPECT_EQ(limits(~uint64_t{0}), (std::vector<size_t>{128, 64}));
  EXPECT_EQ(limits(4096, 8), (std::vector<size_t>{32, 16})) << "each of eight workers has an eighth";
  EXPECT_EQ(limits(4096, 1024), (std::vector<size_t>{4, 2}));
}

}  // namespace
}  // namespace penstock::net
