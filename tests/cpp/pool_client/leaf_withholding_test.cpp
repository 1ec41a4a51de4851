// SPDX-License-Identifier: Apache-2.0
#include "pool_client/leaf_withholding.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace penstock::pool_client {
namespace {

using SeenBatch = LeafWithholding::SeenBatch;
using UsedCut = LeafWithholding::UsedCut;

constexpr uint64_t kLarge = LeafWithholding::kLeafBytesMin;

// Two large leaves and a small one.
SeenBatch batch(std::set<uint32_t> read = {}) {
  return {.leaf_bytes = {kLarge, kLarge, 8}, .read_leaves = std::move(read), .is_watched = true};
}

UsedCut cut(std::set<uint32_t> raw_leaves = {}, bool is_settled = true) {
  return {.raw_leaves = std::move(raw_leaves), .keys = {"key"}, .is_settled = is_settled};
}

// The first shipment within so many calls.
std::optional<wire::Shipment> shipment_within(LeafWithholding& withholding, int call_count, const SeenBatch& seen,
                                              const UsedCut& used) {
  for (int call = 0; call < call_count; ++call)
    if (auto order = withholding.note_call(1, seen, {used})) return order->shipment;
  return std::nullopt;
}

TEST(LeafWithholding, LargeLeavesThatNobodyReadsStayAfterAWhile) {
  LeafWithholding withholding;
  withholding.take(1, 100);
  EXPECT_FALSE(shipment_within(withholding, LeafWithholding::kWatchedCalls, batch(), cut()));
  EXPECT_EQ(withholding.watched_leaves(), (std::set<uint32_t>{0, 1}));
  const auto shipment = shipment_within(withholding, 1, batch(), cut());
  ASSERT_TRUE(shipment);
  EXPECT_EQ(shipment->withheld, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(shipment->whole_every, 100);
  EXPECT_EQ(shipment->boundary_keys, (std::vector<std::vector<std::string>>{{"key"}}));
  EXPECT_TRUE(withholding.is_withholding());
}

TEST(LeafWithholding, WhatTheProgramOrAModelReadsIsSent) {
  LeafWithholding withholding;
  withholding.take(1, 100);
  EXPECT_FALSE(shipment_within(withholding, 50, batch({0}), cut({1})));
  LeafWithholding other;
  other.take(1, 100);
  static_cast<void>(other.note_call(1, batch({0}), {cut()}));
  const auto shipment = shipment_within(other, 50, batch(), cut());
  ASSERT_TRUE(shipment);
  EXPECT_EQ(shipment->withheld, std::vector<uint32_t>{1}) << "it was read once";
}

TEST(LeafWithholding, NothingStaysWhileAPlanIsNewOrAModelRunsWhole) {
  LeafWithholding withholding;
  withholding.take(1, 100);
  withholding.take(2, 10);
  EXPECT_FALSE(shipment_within(withholding, 50, batch(), cut({}, /*is_settled=*/false)));
  static_cast<void>(withholding.note_call(2, batch(), {UsedCut{}}));
  EXPECT_FALSE(shipment_within(withholding, 50, batch(), cut()));
  static_cast<void>(withholding.note_call(2, batch(), {cut()}));
  const auto shipment = shipment_within(withholding, 50, batch(), cut());
  ASSERT_TRUE(shipment);
  EXPECT_EQ(shipment->whole_every, 10);
}

TEST(LeafWithholding, ALeafThatIsReadMoreThanOnceInAWhileIsSentAgain) {
  LeafWithholding withholding;
  withholding.take(1, 100);
  ASSERT_TRUE(shipment_within(withholding, 50, batch(), cut()));
  EXPECT_FALSE(withholding.note_recall(0));
  const auto order = withholding.note_recall(0);
  ASSERT_TRUE(order);
  EXPECT_FALSE(order->shipment);
  EXPECT_FALSE(withholding.is_withholding());
  const auto shipment = shipment_within(withholding, 50, batch(), cut());
  ASSERT_TRUE(shipment);
  EXPECT_EQ(shipment->withheld, std::vector<uint32_t>{1});
}

TEST(LeafWithholding, RecallsFarApartChangeNothing) {
  LeafWithholding withholding;
  withholding.take(1, 100);
  ASSERT_TRUE(shipment_within(withholding, 50, batch(), cut()));
  for (int count = 0; count < 4; ++count) {
    EXPECT_FALSE(withholding.note_recall(0));
    for (uint64_t call = 0; call <= LeafWithholding::kRecallsWindow; ++call)
      static_cast<void>(withholding.note_call(1, std::nullopt, {}));
  }
  EXPECT_TRUE(withholding.is_withholding());
}

TEST(LeafWithholding, AChangedPlanOrAModelThatGoesHasWholeBatchesCome) {
  LeafWithholding withholding;
  withholding.take(1, 100);
  EXPECT_FALSE(withholding.send_whole()) << "they come whole already";
  ASSERT_TRUE(shipment_within(withholding, 50, batch(), cut()));
  const auto order = withholding.send_whole();
  ASSERT_TRUE(order);
  EXPECT_FALSE(order->shipment);
  ASSERT_TRUE(shipment_within(withholding, 50, batch(), cut()));
  EXPECT_TRUE(withholding.forget(1));
}

}  // namespace
}  // namespace penstock::pool_client
