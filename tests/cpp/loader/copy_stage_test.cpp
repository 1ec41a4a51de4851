// SPDX-License-Identifier: Apache-2.0
// Who owns a slab while a device reads it, on a device that ends its copies late, in another order, or not at all.
#include "loader/copy_stage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../worker/shared_tensor.h"
#include "fake_device.h"
#include "loader/batch_memory.h"
#include "slab_batches.h"

namespace penstock::loader {
namespace {

class CopyStageTest : public testing::Test {
 protected:
  void begin(Batch& batch) {
    const auto begun = stage_->begin(batch);
    ASSERT_TRUE(begun) << begun.error().message;
    EXPECT_EQ(batch.tensors().lease(), nullptr) << "the stage has the lease from now on";
  }
  // What the trainer's current stream sees in the batch's tensors, without the host waiting for the copy.
  void expect_on_current(Batch& batch, int64_t value) {
    ASSERT_TRUE(stage_->finish(batch));
    gpu_.run_on_current([tensors = batch.tensors().all(), value] {
      for (const at::Tensor& tensor : tensors) EXPECT_TRUE(is_all(tensor, value));
    });
  }

  // A tensor in each of the encodings.
  std::vector<wire::NarrowSample> draw_samples() {
    std::vector<wire::NarrowSample> samples;
    for (const wire::Encoding encoding : wire::kNarrowEncodings)
      samples.push_back(wire::random_narrow(encoding, 10, random_));
    return samples;
  }
  std::unique_ptr<Batch> make_checked(std::span<const wire::NarrowSample> samples) {
    auto batch = batches_.make_narrow(samples);
    EXPECT_TRUE(batch->tensors().check_narrow());
    EXPECT_TRUE(batch->tensors().try_keep_narrow());
    return batch;
  }
  void expect_widened_on_current(Batch& batch, const std::vector<wire::NarrowSample>& samples) {
    EXPECT_TRUE(batch.tensors().was_widened_on_device());
    ASSERT_TRUE(stage_->finish(batch));
    gpu_.run_on_current([tensors = batch.tensors().all(), samples] {
      for (size_t index = 0; index < samples.size(); ++index)
        EXPECT_TRUE(has_bytes(tensors[index], samples[index].widened())) << index;
    });
  }

  std::mt19937_64 random_{17};
  FakeGpu gpu_;
  SlabBatches batches_{3};
  std::unique_ptr<CopyStage> stage_ = std::make_unique<CopyStage>(std::make_unique<FakeDevice>(gpu_));
};

TEST_F(CopyStageTest, TheSlabComesBackOnlyWhenTheCopyIsOver) {
  for (int64_t round = 1; round <= 20; ++round) {
    gpu_.hold();
    auto batch = batches_.make(round);
    begin(*batch);
    EXPECT_EQ(stage_->reclaim(), 1u);
    EXPECT_EQ(batches_.free_count(), 2u);
    expect_on_current(*batch, round);
    batch.reset();
    EXPECT_EQ(batches_.free_count(), 2u) << "dropping a batch ends no copy";
    gpu_.let_go();
    gpu_.wait_until_idle();
    EXPECT_EQ(stage_->reclaim(), 0u);
    EXPECT_EQ(batches_.free_count(), 3u);
  }
}

TEST_F(CopyStageTest, CopiesThatEndInAnotherOrderGiveBackTheirOwnSlabs) {
  gpu_.hold();
  std::vector<std::unique_ptr<Batch>> batches;
  for (int64_t value = 0; value < 3; ++value) {
    batches.push_back(batches_.make(value));
    begin(*batches.back());
  }
  gpu_.let_one_go(1);
  for (int64_t value = 0; value < 3; ++value) expect_on_current(*batches[static_cast<size_t>(value)], value);
  while (stage_->reclaim() == 3) std::this_thread::yield();
  EXPECT_EQ(batches_.free_count(), 1u);
  const auto next = batches_.make(9);
  EXPECT_EQ(stage_->reclaim(), 2u) << "the slab of the second batch is written while the others are read";
  gpu_.let_go();
  gpu_.wait_until_idle();
  EXPECT_EQ(stage_->reclaim(), 0u);
}

TEST_F(CopyStageTest, AQueryThatFailsGivesNoSlabBackBeforeItsCopyIsOver) {
  // While a CUDA graph was captured, cudaEventQuery failed, and the slabs of copies under way went back: wrong batches.
  gpu_.hold();
  auto batch = batches_.make(4);
  begin(*batch);
  gpu_.fail_queries(1);
  bool has_waited = false;
  gpu_.at_wait([&] {
    has_waited = true;
    EXPECT_EQ(batches_.free_count(), 2u);
  });
  EXPECT_EQ(stage_->reclaim(), 0u);
  EXPECT_TRUE(has_waited);
  EXPECT_EQ(batches_.free_count(), 3u);
  EXPECT_EQ(stage_->retired_count(), 0u);
  expect_on_current(*batch, 4);
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, ADeviceThatIsLostNeverGivesBackWhatItMayStillRead) {
  gpu_.hold();
  auto batch = batches_.make(5);
  begin(*batch);
  gpu_.lose();
  EXPECT_EQ(stage_->reclaim(), 0u);
  EXPECT_EQ(stage_->retired_count(), 1u);
  EXPECT_EQ(batches_.free_count(), 2u);
  EXPECT_EQ(batches_.arena().alive_count(), 2u) << "the worker knows, and makes an arena when too few are left";

  auto next = batches_.make(6);
  const auto begun = stage_->begin(*next);
  ASSERT_FALSE(begun);
  EXPECT_NE(begun.error().message.find("fake:0 is no longer usable in this process (the fake is lost)"),
            std::string::npos);
  next.reset();
  EXPECT_EQ(batches_.free_count(), 2u) << "nothing was read of it";
  EXPECT_FALSE(stage_->finish(*batch)) << "a batch that may never be filled is not given out";
  batch.reset();
  gpu_.let_go();
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, WhatALostDeviceMayStillReadStaysMapped) {
  gpu_.hold();
  std::weak_ptr<shm::ArenaView> view;
  {
    SlabBatches batches(1);
    view = batches.view();
    auto batch = batches.make(5);
    begin(*batch);
  }
  gpu_.lose();
  stage_.reset();
  EXPECT_FALSE(view.expired());
  gpu_.let_go();
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, ACopyThatFailsHalfwayIsWaitedForBeforeItsSlabGoesBack) {
  gpu_.hold();
  gpu_.fail_copy_after(1);
  gpu_.at_wait([&] { EXPECT_EQ(batches_.free_count(), 2u); });
  auto batch = batches_.make(7, 1000, /*tensor_count=*/3);
  const auto begun = stage_->begin(*batch);
  ASSERT_FALSE(begun);
  EXPECT_EQ(begun.error().code, Errc::kFailed);
  EXPECT_EQ(begun.error().message, "copying a batch to fake:0 failed: the fake's copy failed");
  batch.reset();
  EXPECT_EQ(batches_.free_count(), 3u);
  EXPECT_EQ(gpu_.used_bytes(), 0u);
}

TEST_F(CopyStageTest, ACopyWithoutAnEventIsWaitedForToo) {
  gpu_.hold();
  gpu_.fail_records(1);
  auto batch = batches_.make(7);
  EXPECT_FALSE(stage_->begin(*batch));
  batch.reset();
  EXPECT_EQ(batches_.free_count(), 3u);
  auto next = batches_.make(8);
  begin(*next);
  expect_on_current(*next, 8);
  gpu_.let_go();
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, AFullDeviceLeavesTheBatchForAnotherAttempt) {
  gpu_.set_memory_bytes(2 * 8000);
  auto batch = batches_.make(1, 1000, /*tensor_count=*/3);
  const auto begun = stage_->begin(*batch);
  ASSERT_FALSE(begun);
  EXPECT_EQ(begun.error().code, Errc::kNoMemory);
  EXPECT_NE(begun.error().message.find("allocating memory on fake:0 for a batch of 24000 bytes failed"),
            std::string::npos)
      << begun.error().message;
  EXPECT_NE(batch->tensors().lease(), nullptr);
  EXPECT_EQ(gpu_.used_bytes(), 0u);
  EXPECT_EQ(stage_->reclaim(), 0u);
  gpu_.set_memory_bytes(3 * 8000);
  begin(*batch);
  expect_on_current(*batch, 1);
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, AStageThatGoesAwayWaitsForItsCopies) {
  gpu_.hold();
  auto batch = batches_.make(5);
  begin(*batch);
  gpu_.at_wait([&] {
    EXPECT_EQ(batches_.free_count(), 2u);
    EXPECT_EQ(gpu_.registered().size(), 1u) << "the memory is forgotten after the last copy from it";
  });
  stage_.reset();
  EXPECT_EQ(batches_.free_count(), 3u);
  EXPECT_TRUE(gpu_.registered().empty());
  EXPECT_TRUE(is_all(batch->tensors().all().at(0), 5));
}

TEST_F(CopyStageTest, WhatTheTrainerIsGivenIsKeptForItsStream) {
  auto batch = batches_.make(5, 1000, /*tensor_count=*/3);
  begin(*batch);
  EXPECT_EQ(gpu_.handed_over_count(), 0u);
  ASSERT_TRUE(stage_->finish(*batch));
  EXPECT_EQ(gpu_.handed_over_count(), 3u);
  ASSERT_TRUE(stage_->finish(*batch));
  EXPECT_EQ(gpu_.handed_over_count(), 3u) << "once";
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, ALeafThatStayedWithItsWorkerTakesNoMemoryOnTheDevice) {
  wire::TensorEntry withheld = wire::make_entry(4, {1 << 20});
  withheld.encoding = wire::Encoding::kWithheld;
  withheld.bytes = 0;
  auto batch = batches_.make({withheld, wire::make_entry(4, {1000})}, {},
                             [](std::byte* slab) { std::fill_n(reinterpret_cast<int64_t*>(slab), 1000, 7); });
  begin(*batch);
  ASSERT_TRUE(stage_->finish(*batch));
  EXPECT_EQ(gpu_.handed_over_count(), 1u);
  EXPECT_TRUE(batch->tensors().all()[0].is_meta());
  EXPECT_EQ(batch->tensors().all()[0].numel(), 1 << 20);
  gpu_.run_on_current([tensor = batch->tensors().all()[1]] { EXPECT_TRUE(is_all(tensor, 7)); });
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, ASlabIsRegisteredOnce) {
  for (int64_t round = 0; round < 20; ++round) {
    auto batch = batches_.make(round);
    begin(*batch);
    gpu_.wait_until_idle();
    stage_->reclaim();
  }
  EXPECT_EQ(gpu_.registration_count(), 1u);
}

TEST_F(CopyStageTest, AnArenaThatIsUsedOnceIsNotRegistered) {
  auto batch = batches_.make(1, 1000, 1, {.is_transient = true});
  begin(*batch);
  EXPECT_EQ(gpu_.registration_count(), 0u);
  expect_on_current(*batch, 1);
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, AnArenaThatWasReplacedIsForgottenWithTheNextBatch) {
  std::weak_ptr<shm::ArenaView> replaced;
  {
    SlabBatches old(1);
    replaced = old.view();
    auto batch = old.make(1);
    begin(*batch);
    gpu_.wait_until_idle();
    stage_->reclaim();
  }
  EXPECT_FALSE(replaced.expired());
  auto batch = batches_.make(2);
  begin(*batch);
  EXPECT_TRUE(replaced.expired());
  EXPECT_EQ(gpu_.registered().size(), 1u);
}

TEST_F(CopyStageTest, MemoryThatCannotBeRegisteredIsCopiedAsItIs) {
  gpu_.refuse_registrations();
  auto batch = batches_.make(3);
  begin(*batch);
  expect_on_current(*batch, 3);
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, ABatchThatCameThroughTheSocketIsKeptUntilItsCopyIsOver) {
  gpu_.hold();
  const auto record = wire::make_record({wire::make_entry(4, {1000})}, wire::nest_of_tensors(1));
  std::vector<std::byte> payload(8000 + 64);
  for (int64_t place = 0; place < 1000; ++place) std::memset(&payload[static_cast<size_t>(place) * 8], 1, 8);
  auto batch = Batch::from_parts({}, record, payload, /*allow_pickle=*/false).value();
  begin(*batch);
  expect_on_current(*batch, 0x0101010101010101);
  batch.reset();
  gpu_.let_go();
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, WhatCameNarrowIsWidenedOnTheDevice) {
  for (int round = 0; round < 100; ++round) {
    gpu_.hold();
    const auto samples = draw_samples();
    auto batch = make_checked(samples);
    begin(*batch);
    EXPECT_EQ(batches_.free_count(), 2u);
    for (size_t index = 0; index < samples.size(); ++index) {
      const at::Tensor& tensor = batch->tensors().all()[index];
      EXPECT_EQ(tensor.sizes(), at::IntArrayRef(samples[index].entry.shape));
      EXPECT_EQ(static_cast<wire::DTypeCode>(tensor.scalar_type()), samples[index].entry.dtype);
    }
    expect_widened_on_current(*batch, samples);
    gpu_.let_go();
    gpu_.wait_until_idle();
    EXPECT_EQ(stage_->reclaim(), 0u);
    EXPECT_EQ(batches_.free_count(), 3u);
    uint64_t wide_bytes = 0;
    for (const auto& tensor : batch->tensors().all()) wide_bytes += tensor.storage().nbytes();
    EXPECT_EQ(gpu_.used_bytes(), wide_bytes) << "nothing else is left on the device";
  }
  EXPECT_EQ(gpu_.widened_count(), 600u);
}

TEST_F(CopyStageTest, CopiesThatEndInAnotherOrderWidenTheirOwnBatches) {
  gpu_.hold();
  gpu_.shuffle(5);
  std::vector<std::unique_ptr<Batch>> batches;
  for (int count = 0; count < 3; ++count) {
    const auto samples = draw_samples();
    batches.push_back(make_checked(samples));
    begin(*batches.back());
    expect_widened_on_current(*batches.back(), samples);
  }
  gpu_.let_one_go(2);
  while (stage_->reclaim() == 3) std::this_thread::yield();
  EXPECT_EQ(batches_.free_count(), 1u);
  gpu_.let_go();
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, AWideningThatFailsIsWaitedForBeforeItsSlabGoesBack) {
  gpu_.hold();
  gpu_.fail_widening_after(3);
  gpu_.at_wait([&] { EXPECT_EQ(batches_.free_count(), 2u); });
  auto batch = make_checked(draw_samples());
  const auto begun = stage_->begin(*batch);
  ASSERT_FALSE(begun);
  EXPECT_EQ(begun.error().message, "copying a batch to fake:0 failed: the fake's kernel failed");
  batch.reset();
  EXPECT_EQ(batches_.free_count(), 3u);
  EXPECT_EQ(gpu_.used_bytes(), 0u);
}

TEST_F(CopyStageTest, AFullDeviceLeavesANarrowBatchForAnotherAttempt) {
  const std::vector<wire::NarrowSample> samples{wire::random_narrow(wire::Encoding::kPadded, 10, random_)};
  const uint64_t wide_bytes = samples[0].widened().size();
  const uint64_t rows = wide_bytes / wire::dtype_bytes(samples[0].entry.dtype) / samples[0].entry.shape.back();
  const uint64_t needed_bytes = wide_bytes + samples[0].narrow.size() + rows * sizeof(uint64_t);
  auto batch = make_checked(samples);
  for (const uint64_t bytes : {uint64_t{0}, wide_bytes, wide_bytes + samples[0].narrow.size(), needed_bytes - 1}) {
    gpu_.set_memory_bytes(bytes);
    const auto begun = stage_->begin(*batch);
    ASSERT_FALSE(begun);
    EXPECT_EQ(begun.error().code, Errc::kNoMemory);
    const std::string sizes =
        "for a batch of " + std::to_string(batch->record().bytes() + wide_bytes) + " bytes failed";
    EXPECT_NE(begun.error().message.find(sizes), std::string::npos) << begun.error().message;
    EXPECT_NE(batch->tensors().lease(), nullptr);
    EXPECT_EQ(gpu_.used_bytes(), 0u) << "a batch that waits holds nothing of the device";
  }
  gpu_.set_memory_bytes(needed_bytes);
  begin(*batch);
  expect_widened_on_current(*batch, samples);
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, ANarrowBatchForALostDeviceCanBeReadOnTheHost) {
  gpu_.lose();
  const auto samples = draw_samples();
  auto batch = make_checked(samples);
  EXPECT_FALSE(stage_->begin(*batch));
  EXPECT_FALSE(batch->tensors().was_widened_on_device());
  for (size_t index = 0; index < samples.size(); ++index)
    EXPECT_TRUE(has_bytes(batch->tensors().all()[index], samples[index].widened()));
}

TEST_F(CopyStageTest, ANarrowBatchThatCameThroughTheSocketIsKeptUntilItsCopyIsOver) {
  gpu_.hold();
  const auto sample = wire::random_narrow(wire::Encoding::kOffset16, 20, random_);
  const auto record = wire::make_record({sample.entry}, wire::nest_of_tensors(1));
  auto payload = sample.narrow;
  payload.resize(align_up(payload.size(), wire::kPayloadAlignment));
  auto batch = Batch::from_parts({}, record, payload, /*allow_pickle=*/false).value();
  ASSERT_TRUE(batch->tensors().check_narrow());
  ASSERT_TRUE(batch->tensors().try_keep_narrow());
  begin(*batch);
  expect_widened_on_current(*batch, {sample});
  batch.reset();
  gpu_.let_go();
  gpu_.wait_until_idle();
}

TEST_F(CopyStageTest, WithoutKernelsBatchesAreWidenedBeforeTheyCome) {
  EXPECT_TRUE(stage_->takes_narrow());
  gpu_.take_kernels_away();
  EXPECT_FALSE(CopyStage(std::make_unique<FakeDevice>(gpu_)).takes_narrow());
  const auto samples = draw_samples();
  auto batch = batches_.make_narrow(samples);
  BatchMemory memory(1 << 20);
  ASSERT_TRUE(batch->tensors().widen(memory));
  begin(*batch);
  EXPECT_FALSE(batch->tensors().was_widened_on_device());
  ASSERT_TRUE(stage_->finish(*batch));
  gpu_.wait_until_idle();
  for (size_t index = 0; index < samples.size(); ++index)
    EXPECT_TRUE(has_bytes(batch->tensors().all()[index], samples[index].widened()));
  EXPECT_EQ(gpu_.widened_count(), 0u);
}

TEST_F(CopyStageTest, EveryLayoutArrivesToTheBit) {
  const at::Tensor shared = worker::in_shared_memory(100);
  for (const auto& record : wire::sample_records()) {
    std::vector<std::byte> payload(1 << 14);
    for (size_t place = 0; place < payload.size(); ++place) payload[place] = static_cast<std::byte>(place * 7 + 3);
    auto batch = Batch::from_parts({}, record, payload, /*allow_pickle=*/true).value();
    std::vector<FileDescriptor> files;
    for (uint32_t count = 0; count < batch->record().frame().shared_file_count(); ++count)
      files.emplace_back(::dup(worker::file_of(shared)));
    ASSERT_TRUE(batch->tensors().set_shared_files(std::move(files)));
    ASSERT_TRUE(batch->tensors().map_for_copy());
    const std::vector<at::Tensor> hosts = batch->tensors().all();
    if (hosts.empty()) continue;
    begin(*batch);
    ASSERT_TRUE(stage_->finish(*batch));
    gpu_.wait_until_idle();
    for (size_t index = 0; index < hosts.size(); ++index) {
      const at::Tensor& copied = batch->tensors().all()[index];
      EXPECT_EQ(copied.scalar_type(), hosts[index].scalar_type());
      EXPECT_EQ(copied.sizes(), hosts[index].sizes());
      EXPECT_EQ(copied.strides(), hosts[index].strides());
      ASSERT_EQ(copied.storage().nbytes(), hosts[index].storage().nbytes());
      const auto* const bytes = static_cast<const std::byte*>(copied.storage().data());
      const auto* const expected = static_cast<const std::byte*>(hosts[index].storage().data());
      EXPECT_TRUE(std::equal(bytes, bytes + copied.storage().nbytes(), expected));
    }
  }
}

// Copies that are begun before the program asks for them, on a device that ends its copies late or not at all.

const c10::Device kPlace(c10::kCUDA, 0);

class AheadStageTest : public testing::Test {
 protected:
  void wish(std::vector<uint32_t> leaves) {
    requests_->set(std::make_shared<AheadRequest>(AheadRequest{.device = kPlace, .leaves = std::move(leaves)}));
  }
  std::unique_ptr<Batch> staged(int64_t value) {
    auto batch = batches_.make(value);
    EXPECT_TRUE(stage_->begin(*batch));
    return batch;
  }

  FakeGpu gpu_;
  SlabBatches batches_{3};
  std::shared_ptr<AheadWishes> requests_ = std::make_shared<AheadWishes>();
  std::unique_ptr<AheadStage> stage_ = std::make_unique<AheadStage>(
      requests_,
      [this](c10::Device) -> Result<std::unique_ptr<device::Device>> { return {std::make_unique<FakeDevice>(gpu_)}; });
};

TEST_F(AheadStageTest, NothingIsCopiedThatNobodyWishesFor) {
  auto batch = staged(1);
  EXPECT_EQ(batch->ahead(), nullptr);
  wish({7});
  batch = staged(2);
  EXPECT_EQ(batch->ahead(), nullptr) << "the batch has no such leaf";
  EXPECT_NE(batch->tensors().lease(), nullptr);
}

TEST_F(AheadStageTest, ATensorStaysOnTheHostAndItsCopyIsGivenOnce) {
  wish({0});
  auto batch = staged(3);
  ASSERT_NE(batch->ahead(), nullptr);
  EXPECT_TRUE(is_all(batch->tensors().all().at(0), 3));
  const auto copy = batch->ahead()->take(0);
  ASSERT_TRUE(copy);
  EXPECT_NE(copy->data_ptr(), batch->tensors().all().at(0).data_ptr());
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
  batch->tensors().copy_out();
  EXPECT_EQ(batches_.free_count(), 2u) << "the device still reads it";
  gpu_.let_go();
  gpu_.wait_until_idle();
  EXPECT_EQ(stage_->reclaim(), 0u);
  EXPECT_EQ(batches_.free_count(), 3u);
  EXPECT_TRUE(is_all(batch->tensors().all().at(0), 8));
  EXPECT_TRUE(is_all(*batch->ahead()->take(0), 8));
}

TEST_F(AheadStageTest, WithoutMemoryOnTheDeviceTheBatchGoesOnWithoutACopy) {
  wish({0});
  gpu_.set_memory_bytes(100);
  auto batch = staged(5);
  EXPECT_EQ(batch->ahead(), nullptr);
  EXPECT_TRUE(is_all(batch->tensors().all().at(0), 5));
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
  EXPECT_TRUE(is_all(batch->tensors().all().at(0), 7));
}

TEST_F(AheadStageTest, ADeviceThatCannotBeOpenedIsAskedForOnce) {
  int asked = 0;
  AheadStage stage(requests_, [&](c10::Device) -> Result<std::unique_ptr<device::Device>> {
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
