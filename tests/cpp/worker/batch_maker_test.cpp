// SPDX-License-Identifier: Apache-2.0
#include "worker/batch_maker.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "batch_fixture.h"
#include "megabyte.h"
#include "shared_tensor.h"
#include "wire/nest.h"
#include "worker/batch_server.h"

namespace penstock::worker {
namespace {

constexpr double kGigabit = 125e6;  // bytes a second

TEST(NarrowingTest, IsWorthwhileWhereTheLinkIsSlowerThanTheWriting) {
  EXPECT_TRUE(is_narrow_worthwhile(8000, 1000, kGigabit));
  EXPECT_TRUE(is_narrow_worthwhile(8000, 5000, kGigabit));
  EXPECT_FALSE(is_narrow_worthwhile(8000, 7000, kGigabit));
  EXPECT_FALSE(is_narrow_worthwhile(8000, 1000, 10 * kGigabit));
  EXPECT_FALSE(is_narrow_worthwhile(8000, 1000, 0));  // not known
  EXPECT_FALSE(is_narrow_worthwhile(8000, 8000, 1));
}

TEST(NarrowingTest, TensorsThatFitAreNarrowed) {
  Narrowing narrowing;
  BatchContent content{.tensors = {at::arange(1000), at::rand({1000}), at::arange(1000), at::arange(10)},
                       .boundary_keys = {},
                       .nest = {}};
  content.withheld = {2};
  const auto forms = narrowing.forms_of(content, kGigabit);
  ASSERT_EQ(forms.size(), 4u);
  EXPECT_EQ(forms[0]->encoding, wire::Encoding::kOffset16);
  EXPECT_FALSE(forms[1]);
  EXPECT_FALSE(forms[2]);
  EXPECT_FALSE(forms[3]);
  EXPECT_TRUE(narrowing.forms_of(content, 100 * kGigabit).empty());
}

TEST(NarrowingTest, TensorThatDidNotFitIsLookedAtNowAndThen) {
  Narrowing narrowing;
  const BatchContent misfit{.tensors = {at::rand({1000})}, .boundary_keys = {}, .nest = {}};
  const BatchContent fit{.tensors = {at::arange(1000)}, .boundary_keys = {}, .nest = {}};
  for (int count = 0; count < 4; ++count) EXPECT_TRUE(narrowing.forms_of(misfit, kGigabit).empty());
  int batches = 1;
  while (narrowing.forms_of(fit, kGigabit).empty()) ++batches;
  EXPECT_EQ(batches, 64);
  EXPECT_FALSE(narrowing.forms_of(fit, kGigabit).empty());  // from here on always
}

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

TEST_F(WithholdingTest, TensorsThatAnObjectIsMadeOfAreSent) {
  nest_.clear();
  nest_.object("torch:Tensor", 3);
  nest_.none();
  nest_.tensor(0);
  nest_.tensor(1);
  content_.nest = nest_.view();
  EXPECT_EQ(withheld(), Leaves{2});
  nest_.clear();
  nest_.object("m:A", 2);
  nest_.none();
  nest_.dict(1);
  nest_.text("a");
  nest_.tensor(0);
  content_.nest = nest_.view();
  EXPECT_EQ(withheld(), (Leaves{0, 2}));
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

constexpr int64_t kLarge = 2 * kSharedBytesMin / sizeof(float);

class SharingTest : public BatchTest {
 protected:
  SharingTest() { open({.arena_bytes = 8 * kMegabyte, .prefetch_factor = 2}); }

  static std::vector<std::optional<uint32_t>> places_of(std::vector<at::Tensor> tensors,
                                                        std::vector<std::string> keys = {}) {
    return leaves_to_share({.tensors = std::move(tensors), .boundary_keys = std::move(keys), .nest = {}})
        .storage_of_leaf;
  }
};

using Places = std::vector<std::optional<uint32_t>>;

TEST_F(SharingTest, LargeTensorsInSharedMemoryAreSharedByTheirStorage) {
  const auto first = in_shared_memory(kLarge);
  const auto second = in_shared_memory(kLarge);
  const auto own = at::arange(kLarge);
  EXPECT_EQ(places_of({own, second, first, second.slice(0, 10)}), (Places{std::nullopt, 0, 1, 0}));
}

TEST_F(SharingTest, ASmallTensorIsCopiedUnlessALargeOneIsOnItsStorage) {
  const auto tensor = in_shared_memory(kLarge);
  EXPECT_EQ(places_of({tensor.slice(0, 0, 10)}), Places{});
  EXPECT_EQ(places_of({tensor.slice(0, 0, 10), tensor}), (Places{0, 0}));
}

TEST_F(SharingTest, BoundaryTensorsAreCopied) {
  const auto tensor = in_shared_memory(kLarge);
  EXPECT_EQ(places_of({tensor}, {kKey}), Places{});
  EXPECT_EQ(places_of({tensor, tensor}, {kKey}), Places{0});
}

TEST_F(SharingTest, StoragesBeyondTheCapAreCopied) {
  std::vector<at::Tensor> tensors;
  for (uint32_t count = 0; count < wire::kSharedFileCountMax + 3; ++count) tensors.push_back(in_shared_memory(kLarge));
  const auto places = places_of(tensors);
  EXPECT_EQ(places[wire::kSharedFileCountMax - 1], wire::kSharedFileCountMax - 1);
  EXPECT_EQ(places[wire::kSharedFileCountMax], std::nullopt);
}

TEST_F(SharingTest, ASealedBatchNamesTheFileAndCopiesTheRest) {
  const auto shared = in_shared_memory(kLarge);
  const auto own = at::arange(5);
  wire::NestWriter nest;
  nest.none();
  BatchContent content{.tensors = {own, shared.slice(0, 3)}, .boundary_keys = {}, .nest = nest.view()};
  content.shared = leaves_to_share(content);
  const auto sealed = writer_->seal(content);
  ASSERT_TRUE(sealed);
  ASSERT_EQ(sealed.value().shared.size(), 1u);
  EXPECT_TRUE(sealed.value().shared[0].is_alias_of(shared.storage()));
  const auto frame = frame_of(sealed.value());
  EXPECT_EQ(frame.tensors[1].encoding, wire::Encoding::kShared);
  EXPECT_EQ(frame.tensors[1].offset, 12u);
  EXPECT_EQ(frame.payload_bytes, 64u);
}

TEST_F(SharingTest, ASharedTensorStaysSharedWhenTheBatchMovesToALargerSlab) {
  const auto shared = in_shared_memory(kLarge);
  const auto own = at::arange(static_cast<int64_t>(3 * kMegabyte / 8));
  wire::NestWriter nest;
  nest.none();
  BatchContent content{.tensors = {shared, own}, .boundary_keys = {}, .nest = nest.view()};
  content.shared = leaves_to_share(content);
  const auto sealed = writer_->seal(content);
  ASSERT_TRUE(sealed);
  EXPECT_EQ(frame_of(sealed.value()).tensors[0].encoding, wire::Encoding::kShared);
  EXPECT_EQ(frame_of(sealed.value()).tensors[0].offset, 0u);
  EXPECT_GE(frame_of(sealed.value()).payload_bytes, 3 * kMegabyte);
}

}  // namespace
}  // namespace penstock::worker
