// SPDX-License-Identifier: Apache-2.0
// Pinned batches stay in their slabs: when a slab goes back, and when a batch is copied after all.
#include "loader/batch_stage.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <memory>
#include <optional>
#include <utility>

#include "fake_device.h"
#include "slab_batches.h"

namespace penstock::loader {
namespace {

class PinStageTest : public testing::Test {
 protected:
  ~PinStageTest() override {
    stage_.reset();
    EXPECT_TRUE(memory_.registered().empty()) << "memory stayed registered";
  }

  std::byte* slab() { return batches_.view()->slab(0); }

  at::Tensor pin_one(int64_t value) {
    auto batch = batches_.make(value);
    const auto begun = stage_->begin(*batch);
    EXPECT_TRUE(begun) << begun.error().message;
    batch->tensors().mark_held();
    return batch->tensors().all().at(0);
  }

  // Without a device torch has no pinned memory to copy to, which is the stage's error.
  void expect_copied(Batch& batch) {
    const auto begun = stage_->begin(batch);
    if (!at::hasCUDA()) {
      ASSERT_FALSE(begun);
      EXPECT_TRUE(begun.error().message.starts_with("copying a batch to pinned memory failed"));
      return;
    }
    ASSERT_TRUE(begun) << begun.error().message;
    EXPECT_TRUE(batch.tensors().all().at(0).is_pinned());
    EXPECT_EQ(batch.tensors().lease(), nullptr);
  }

  SlabBatches batches_{1};
  FakeWatch memory_;
  std::unique_ptr<PinStage> stage_ = std::make_unique<PinStage>(memory_.open(), std::nullopt);
};

TEST_F(PinStageTest, BatchStaysInItsSlabWhichIsRegisteredOnce) {
  for (int64_t value = 0; value < 5; ++value) {
    const at::Tensor tensor = pin_one(value);
    EXPECT_EQ(tensor.const_data_ptr(), slab());
    EXPECT_TRUE(is_all(tensor, value));
  }
  EXPECT_EQ(memory_.registration_count(), 1u);
  EXPECT_EQ(batches_.free_count(), 1u);
}

TEST_F(PinStageTest, SlabReturnsWhenTheLastCopyFromItIsOver) {
  at::Tensor tensor = pin_one(1);
  memory_.begin_read(slab());
  tensor.reset();
  EXPECT_EQ(batches_.free_count(), 0u);
  EXPECT_EQ(batches_.view()->held_count(), 0u) << "no tensor is on the slab";
  EXPECT_EQ(stage_->reclaim(), 1u);
  EXPECT_EQ(batches_.free_count(), 0u);
  memory_.end_reads(slab());
  EXPECT_EQ(stage_->reclaim(), 0u);
  EXPECT_EQ(batches_.free_count(), 1u);
}

TEST_F(PinStageTest, TensorThatLivesKeepsItsSlabWhateverIsRead) {
  const at::Tensor tensor = pin_one(1);
  memory_.begin_read(slab());
  memory_.end_reads(slab());
  EXPECT_EQ(stage_->reclaim(), 0u);
  EXPECT_EQ(batches_.free_count(), 0u);
}

TEST_F(PinStageTest, SlabThatIsStillReadWakesTheThreadThatReclaims) {
  Waker waker;
  stage_->set_waker(waker);
  waker.begin_turn();
  pin_one(1);
  EXPECT_TRUE(waker.begin_sleep()) << "woken without need";
  waker.begin_turn();
  at::Tensor tensor = pin_one(2);
  memory_.begin_read(slab());
  tensor.reset();
  EXPECT_FALSE(waker.begin_sleep());
  memory_.end_reads(slab());
}

TEST_F(PinStageTest, StageThatEndsWaitsForCopiesFromSlabsThatNobodyHolds) {
  at::Tensor tensor = pin_one(1);
  memory_.begin_read(slab());
  tensor.reset();
  stage_.reset();  // the fake's copies end when they are waited for
  EXPECT_EQ(memory_.wait_count(), 1u);
  EXPECT_EQ(batches_.free_count(), 1u);
}

TEST_F(PinStageTest, TensorsThatOutliveTheStageStayPinnedAndWaitForTheirCopies) {
  at::Tensor tensor = pin_one(7);
  stage_.reset();
  EXPECT_EQ(memory_.registered().size(), 1u);
  EXPECT_TRUE(is_all(tensor, 7));
  memory_.begin_read(slab());
  tensor.reset();
  EXPECT_EQ(memory_.wait_count(), 1u);
  EXPECT_EQ(batches_.free_count(), 1u);
  EXPECT_TRUE(memory_.registered().empty());
}

TEST_F(PinStageTest, ForkedChildLeavesSlabAndRegistrationToItsParent) {
  at::Tensor tensor = pin_one(3);
  const pid_t child = ::fork();
  if (child == 0) {
    tensor.reset();
    ::_exit(memory_.registered().size() == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(batches_.free_count(), 0u);
  EXPECT_TRUE(is_all(tensor, 3));
}

TEST_F(PinStageTest, BatchThatLiesInAnArenaForOneUseIsCopied) {
  auto batch = batches_.make(1, 1000, 1, {.is_transient = true});
  expect_copied(*batch);
  EXPECT_EQ(memory_.registration_count(), 0u);
}

TEST_F(PinStageTest, BatchIsCopiedWhereItsSlabCannotBeRegistered) {
  memory_.refuse_registrations();
  auto batch = batches_.make(1);
  expect_copied(*batch);
}

TEST_F(PinStageTest, BatchIsCopiedWhereNothingTellsOfCopies) {
  stage_ = std::make_unique<PinStage>(nullptr, std::nullopt);
  auto batch = batches_.make(1);
  expect_copied(*batch);
}

TEST(PinStageOfAnArena, BatchBeyondTheSlabsThatTheProgramMayHoldIsCopied) {
  SlabBatches batches(4);
  FakeWatch memory;
  PinStage stage(memory.open(), /*owed_slab_count=*/2);
  std::vector<at::Tensor> held;
  for (int64_t value = 0; value < 2; ++value) {
    auto batch = batches.make(value);
    ASSERT_TRUE(stage.begin(*batch));
    batch->tensors().mark_held();
    held.push_back(batch->tensors().all().at(0));
  }
  auto third = batches.make(2);
  const auto begun = stage.begin(*third);
  EXPECT_EQ(static_cast<bool>(begun), at::hasCUDA()) << "it was not copied";
}

TEST(PinStageOfUnknownReads, SlabThatMayBeReadForEverIsRetiredAndStaysMapped) {
  SlabBatches batches(2);
  FakeWatch memory;
  PinStage stage(memory.open(), std::nullopt);
  std::byte* base = nullptr;
  {
    auto batch = batches.make(5);
    ASSERT_TRUE(stage.begin(*batch));
    base = batch->tensors().lease()->data();
    memory.lose_track(base);
  }
  EXPECT_EQ(batches.view()->alive_count(), 1u);
  EXPECT_EQ(batches.free_count(), 1u);
  EXPECT_EQ(stage.reclaim(), 0u);
}

}  // namespace
}  // namespace penstock::loader
