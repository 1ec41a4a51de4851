// SPDX-License-Identifier: Apache-2.0
#include "worker/withholding.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "wire/nest.h"
#include "worker/kept_batches.h"

namespace penstock::worker {
namespace {

using Leaves = std::vector<uint32_t>;

std::string key(char letter) { return std::string(32, letter); }

// A batch of three leaves and a boundary tensor.
class WithholdingTest : public testing::Test {
 protected:
  WithholdingTest() {
    nest_.tuple(3);
    for (uint32_t leaf = 0; leaf < 3; ++leaf) nest_.tensor(leaf);
    content_.tensors = {at::zeros({4}), at::zeros({5}), at::zeros({6}), at::zeros({7})};
    content_.boundary_keys = {key('a')};
    content_.nest = nest_.view();
  }

  Leaves withheld(uint64_t number = 1) const { return leaves_to_withhold(shipment_, content_, number); }

  wire::NestWriter nest_;
  BatchContent content_;
  wire::Shipment shipment_{.boundary_keys = {{key('a')}}, .withheld = {0, 2}, .whole_every = 10};
};

TEST_F(WithholdingTest, LeavesStayBehindWhereTheBoundaryTensorsAreThere) { EXPECT_EQ(withheld(), (Leaves{0, 2})); }

TEST_F(WithholdingTest, BatchWithoutABoundaryTensorIsSentWhole) {
  shipment_.boundary_keys = {{key('a'), key('b')}};
  EXPECT_EQ(withheld(), Leaves());
  shipment_.boundary_keys.push_back({key('a')});  // of another plan
  EXPECT_EQ(withheld(), (Leaves{0, 2}));
  shipment_.boundary_keys.clear();
  EXPECT_EQ(withheld(), Leaves());
}

TEST_F(WithholdingTest, BatchThatIsComparedIsSentWhole) {
  EXPECT_EQ(withheld(0), Leaves());
  EXPECT_EQ(withheld(20), Leaves());
  shipment_.whole_every = 0;
  EXPECT_EQ(withheld(0), (Leaves{0, 2}));
}

TEST_F(WithholdingTest, BoundaryTensorsAndPlacesThatAreNotThereAreNeverWithheld) {
  shipment_.withheld = {2, 3, 4, 1000};
  EXPECT_EQ(withheld(), Leaves{2});
}

TEST_F(WithholdingTest, ArraysAreSent) {
  nest_.clear();
  nest_.tuple(2);
  nest_.array(0, "");
  nest_.tensor(2);
  content_.nest = nest_.view();
  EXPECT_EQ(withheld(), Leaves{2});
}

TEST_F(WithholdingTest, PickledBatchIsSentWhole) {
  nest_.clear();
  nest_.pickle("anything");
  content_.nest = nest_.view();
  EXPECT_EQ(withheld(), Leaves());
}

TEST_F(WithholdingTest, LeavesThatShareMemoryAreSent) {
  content_.tensors[1] = content_.tensors[0].slice(0, 1, 3);
  EXPECT_EQ(withheld(), Leaves{2});
  content_.tensors[3] = content_.tensors[2].slice(0, 1, 3);  // a boundary tensor is copied in any case
  EXPECT_EQ(withheld(), Leaves{2});
}

TEST_F(WithholdingTest, NewestBatchesAreKept) {
  KeptBatches kept;
  for (uint64_t sequence = 0; sequence < 10; ++sequence) kept.keep(1, {1, sequence}, content_, 0, 1 << 20);
  EXPECT_EQ(kept.find(1, {1, 5}), nullptr);
  ASSERT_NE(kept.find(1, {1, 9}), nullptr);
  EXPECT_EQ(kept.find(1, {1, 9})->content().tensors.size(), 4u);
  EXPECT_EQ(kept.find(2, {1, 9}), nullptr);
  kept.keep(1, {1, 20}, content_, 0, 10);  // larger than one may be
  EXPECT_EQ(kept.find(1, {1, 20}), nullptr);
  kept.keep(2, {1, 1}, content_, 0, 1 << 20);  // another trainer
  EXPECT_EQ(kept.find(1, {1, 9}), nullptr);
}

}  // namespace
}  // namespace penstock::worker
