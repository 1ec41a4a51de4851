// SPDX-License-Identifier: Apache-2.0
// Copies that are begun before the program asks for them, on a device that ends its copies late or not at all.
#include "loader/ahead_stage.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "slab_batches.h"

namespace penstock::loader {
namespace {

const c10::Device kPlace(c10::kCUDA, 0);

class AheadStageTest : public testing::Test {
 protected:
  void wish(std::vector<uint32_t> leaves) {
    wishes_->set(std::make_shared<AheadWish>(AheadWish{.device = kPlace, .leaves = std::move(leaves)}));
  }
  std::unique_ptr<Batch> staged(int64_t value) {
    auto batch = batches_.make(value);
    EXPECT_TRUE(stage_->begin(*batch));
    return batch;
  }

  FakeGpu gpu_;
  SlabBatches batches_{3};
  std::shared_ptr<AheadWishes> wishes_ = std::make_shared<AheadWishes>();
  std::unique_ptr<AheadStage> stage_ = std::make_unique<AheadStage>(
      wishes_,
      [this](c10::Device) -> Result<std::unique_ptr<device::Device>> { return {std::make_unique<FakeDevice>(gpu_)}; });
};

TEST_F(AheadStageTest, NothingIsCopiedThatNobodyWishesFor) {
  auto batch = staged(1);
  EXPECT_EQ(batch->ahead(), nullptr);
  wish({7});
  batch = staged(2);
  EXPECT_EQ(batch->ahead(), nullptr) << "the batch has no such leaf";
  EXPECT_NE(batch->lease(), nullptr);
}

TEST_F(AheadStageTest, ATensorStaysOnTheHostAndItsCopyIsGivenOnce) {
  wish({0});
  auto batch = staged(3);
  ASSERT_NE(batch->ahead(), nullptr);
  EXPECT_TRUE(is_all(batch->tensors().at(0), 3));
  const auto copy = batch->ahead()->take(0);
  ASSERT_TRUE(copy);
  EXPECT_NE(copy->data_ptr(), batch->tensors().at(0).data_ptr());
  EXPECT_TRUE(is_all(*copy, 3)) << "take() waits until the source is read";
  EXPECT_FALSE(batch->ahead()->take(0));
  EXPECT_FALSE(batch->ahead()->take(1)) << "nobody wished for it";
}

TEST_F(AheadStageTest, TheSlabComesBackOnlyWhenTheCopyIsOver) {
  wish({0});
  gpu_.hold();
  auto batch = staged(4);
  batch.reset();
  EXPECT_EQ(stage_->reclaim(), 1u);
  EXPECT_EQ(batches_.free_count(), 2u);
  gpu_.let_go();
  gpu_.wait_until_idle();
  EXPECT_EQ(stage_->reclaim(), 0u);
  EXPECT_EQ(batches_.free_count(), 3u);
}

TEST_F(AheadStageTest, ABatchCanStillBeCopiedOutOfItsSlab) {
  wish({0});
  gpu_.hold();
  auto batch = staged(8);
  batch->copy_out();
  EXPECT_EQ(batches_.free_count(), 2u) << "the device still reads it";
  gpu_.let_go();
  gpu_.wait_until_idle();
  EXPECT_EQ(stage_->reclaim(), 0u);
  EXPECT_EQ(batches_.free_count(), 3u);
  EXPECT_TRUE(is_all(batch->tensors().at(0), 8));
  EXPECT_TRUE(is_all(*batch->ahead()->take(0), 8));
}

TEST_F(AheadStageTest, WithoutMemoryOnTheDeviceTheBatchGoesOnWithoutACopy) {
  wish({0});
  gpu_.set_memory_bytes(100);
  auto batch = staged(5);
  EXPECT_EQ(batch->ahead(), nullptr);
  EXPECT_TRUE(is_all(batch->tensors().at(0), 5));
  gpu_.set_memory_bytes(1 << 20);
  EXPECT_NE(staged(6)->ahead(), nullptr);
}

TEST_F(AheadStageTest, ADeviceThatIsLostLeavesTheBatchesOnTheHost) {
  wish({0});
  auto before = staged(6);
  gpu_.lose();
  EXPECT_FALSE(before->ahead()->take(0));
  auto batch = staged(7);
  EXPECT_EQ(batch->ahead(), nullptr);
  EXPECT_TRUE(is_all(batch->tensors().at(0), 7));
}

TEST_F(AheadStageTest, ADeviceThatCannotBeOpenedIsAskedForOnce) {
  int asked = 0;
  AheadStage stage(wishes_, [&](c10::Device) -> Result<std::unique_ptr<device::Device>> {
    ++asked;
    return Fault{Errc::kUnsupported, "no such device"};
  });
  wish({0});
  for (int64_t value = 0; value < 3; ++value) {
    auto batch = batches_.make(value);
    EXPECT_TRUE(stage.begin(*batch));
    EXPECT_EQ(batch->ahead(), nullptr);
  }
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace penstock::loader
