// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_device.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "loader/client.h"

#ifdef PENSTOCK_WITH_CUDA
#include <ATen/Functions.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "../wire/narrow_samples.h"
#include "../wire/record_samples.h"
#include "loader/batch_stage.h"
#include "loader/copy_stage.h"
#include "shm/arena.h"
#include "stream_fixture.h"
#endif

namespace penstock::loader {
namespace {

[[maybe_unused]] const c10::Device kFirst(c10::kCUDA, 0);

TEST(CudaDevice, ADeviceThatIsNotThereIsUnsupportedAndTheMessageSaysWhich) {
  for (const int device_index : {-1, 1000, std::numeric_limits<int>::max()}) {
    const auto device = device::open_cuda_device(device_index);
    ASSERT_FALSE(device);
    EXPECT_EQ(device.error().code, Errc::kUnsupported);
    EXPECT_NE(device.error().message.find("cuda:" + std::to_string(device_index)), std::string::npos);
    EXPECT_NE(device.error().message.find("device=None"), std::string::npos) << device.error().message;
  }
}

TEST(CudaDevice, AClientForADeviceThatIsNotThereDoesNotStart) {
  Client client({.worker_count = 1, .device = c10::Device(c10::kCUDA, 100)});
  const auto started = client.start();
  ASSERT_FALSE(started);
  EXPECT_EQ(started.error().code, Errc::kUnsupported);
}

#ifdef PENSTOCK_WITH_CUDA

// Why the tests below cannot run here; empty where they can.
std::string missing_device() { return c10::cuda::device_count() > 0 ? "" : "this machine has no CUDA device"; }

#define PENSTOCK_NEEDS_CUDA() \
  if (const auto reason = missing_device(); !reason.empty()) GTEST_SKIP() << reason

class CudaStreamTest : public StreamTest {
 protected:
  // Holds tensors on the device against the batch that they must be.
  void expect_right_on_device(const std::vector<at::Tensor>& tensors, uint64_t sequence) {
    std::vector<at::Tensor> hosts;
    for (const at::Tensor& tensor : tensors) {
      ASSERT_TRUE(tensor.is_cuda());
      hosts.push_back(tensor.cpu());
    }
    expect_right(hosts, sequence);
  }
};

TEST_F(CudaStreamTest, BatchesArriveOnTheDeviceEqualToTheHosts) {
  PENSTOCK_NEEDS_CUDA();
  start({.worker_count = 2, .device = kFirst});
  begin_epoch(draw_batches(200));
  for (uint64_t sequence = 0; sequence < 200 && !HasFatalFailure(); ++sequence) {
    expect_right_on_device(next_batch()->tensors().all(), sequence);
  }
}

TEST_F(CudaStreamTest, LargeBatchesArriveOnTheDeviceAndTheirArenasAreGivenUp) {
  PENSTOCK_NEEDS_CUDA();
  start({.worker_count = 1, .device = kFirst});
  begin_epoch(std::vector<Indices>(50, Indices{test::kLarge, 1}));
  for (uint64_t sequence = 0; sequence < 50 && !HasFatalFailure(); ++sequence) {
    expect_right_on_device(next_batch()->tensors().all(), sequence);
  }
}

TEST_F(CudaStreamTest, AUserWhoKeepsEveryBatchOnTheDeviceHasThemAll) {
  PENSTOCK_NEEDS_CUDA();
  start({.worker_count = 2, .device = kFirst});
  begin_epoch(draw_batches(100));
  std::vector<std::vector<at::Tensor>> kept;
  for (int count = 0; count < 100; ++count) kept.push_back(next_batch()->tensors().all());
  for (size_t sequence = 0; sequence < kept.size(); ++sequence) expect_right_on_device(kept[sequence], sequence);
}

TEST_F(CudaStreamTest, BatchesArriveWhileAGraphIsCapturedInTheGlobalMode) {
  PENSTOCK_NEEDS_CUDA();
  // A query of the thread that received batches failed the capture, and slabs went back while they were read.
  start({.worker_count = 2, .prefetch_factor = 4, .device = kFirst});
  begin_epoch(draw_batches(200));
  at::Tensor input = at::ones({1 << 20}, at::kCUDA);
  for (uint64_t sequence = 0; sequence < 200 && !HasFatalFailure(); ++sequence) {
    at::cuda::CUDAGraph graph;
    at::Tensor output;
    {
      const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
      graph.capture_begin({0, 0}, cudaStreamCaptureModeGlobal);
      output = input.add(1);
      // Long enough for the stages to begin and end copies meanwhile.
      client_->wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(3));
      output = output.mul(2);
      graph.capture_end();
    }
    graph.replay();
    expect_right_on_device(next_batch()->tensors().all(), sequence);
    EXPECT_TRUE(output.eq(4).all().item<bool>());
  }
}

TEST_F(CudaStreamTest, ABatchIsTakenInsideACapture) {
  PENSTOCK_NEEDS_CUDA();
  start({.worker_count = 1, .device = kFirst});
  begin_epoch(draw_batches(20));
  for (uint64_t sequence = 0; sequence < 20 && !HasFatalFailure(); ++sequence) {
    at::cuda::CUDAGraph graph;
    std::vector<at::Tensor> tensors;
    {
      const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
      at::Tensor input = at::ones({16}, at::kCUDA);
      graph.capture_begin({0, 0}, cudaStreamCaptureModeGlobal);
      tensors = next_batch()->tensors().all();
      input = input.add(1);
      graph.capture_end();
    }
    expect_right_on_device(tensors, sequence);
  }
}

TEST_F(CudaStreamTest, ASmallBoundOfStagedBytesChangesNoBatch) {
  PENSTOCK_NEEDS_CUDA();
  start({.worker_count = 3, .prefetch_factor = 4, .prefetch_bytes = 1, .device = kFirst});
  begin_epoch(draw_batches(100));
  for (uint64_t sequence = 0; sequence < 100 && !HasFatalFailure(); ++sequence) {
    expect_right_on_device(next_batch()->tensors().all(), sequence);
  }
}

TEST_F(CudaStreamTest, EveryDeviceGetsItsOwnBatches) {
  PENSTOCK_NEEDS_CUDA();
  for (int index = 0; index < c10::cuda::device_count(); ++index) {
    start({.worker_count = 1, .device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))});
    epoch_ = 0;
    begin_epoch(draw_batches(30));
    for (uint64_t sequence = 0; sequence < 30 && !HasFatalFailure(); ++sequence) {
      const auto tensors = next_batch()->tensors().all();
      EXPECT_EQ(tensors.front().device().index(), index);
      expect_right_on_device(tensors, sequence);
    }
    TearDown();
  }
}

TEST_F(CudaStreamTest, BatchesComeInPinnedMemoryWhenItIsAskedFor) {
  PENSTOCK_NEEDS_CUDA();
  start({.worker_count = 2, .pin_memory = true});
  begin_epoch(draw_batches(50));
  for (uint64_t sequence = 0; sequence < 50 && !HasFatalFailure(); ++sequence) {
    const auto tensors = next_batch()->tensors().all();
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(tensor.numel() == 0 || tensor.is_pinned());
    expect_right(tensors, sequence);
  }
}

TEST_F(CudaStreamTest, PinnedBatchesThatAreCopiedAndDroppedAreRightOnTheDevice) {
  PENSTOCK_NEEDS_CUDA();
  start({.worker_count = 2, .prefetch_factor = 3, .pin_memory = true});
  begin_epoch(draw_batches(300));
  std::vector<std::vector<at::Tensor>> on_device;
  at::Tensor busy = at::ones({1 << 22}, at::kCUDA);
  for (uint64_t sequence = 0; sequence < 300; ++sequence) {
    // The device is behind: the copy below has not begun when the batch is dropped.
    for (int round = 0; round < 20; ++round) busy = busy.add(1);
    std::vector<at::Tensor> copies;
    const std::unique_ptr<Batch> batch = next_batch();
    for (const at::Tensor& tensor : batch->tensors().all())
      copies.push_back(tensor.to(at::kCUDA, /*non_blocking=*/true));
    on_device.push_back(std::move(copies));
  }
  for (uint64_t sequence = 0; sequence < 300 && !HasFatalFailure(); ++sequence)
    expect_right_on_device(on_device[sequence], sequence);
}

TEST_F(CudaStreamTest, UserWhoKeepsEveryPinnedBatchHasThemAllPinned) {
  PENSTOCK_NEEDS_CUDA();
  start({.worker_count = 2, .pin_memory = true});
  begin_epoch(draw_batches(100));
  std::vector<std::vector<at::Tensor>> kept;
  for (int count = 0; count < 100; ++count) kept.push_back(next_batch()->tensors().all());
  for (size_t sequence = 0; sequence < kept.size(); ++sequence) {
    for (const at::Tensor& tensor : kept[sequence]) EXPECT_TRUE(tensor.numel() == 0 || tensor.is_pinned());
    expect_right(kept[sequence], sequence);
  }
}

// One arena in this process and a stage on it, without a client.
class CudaStageTest : public testing::Test {
 protected:
  static constexpr int64_t kElementCount = 1 << 24;

  void open(uint32_t slab_count, bool is_transient = false) {
    is_transient_ = is_transient;
    arena_ = shm::Arena::create({.slab_bytes = kElementCount * 8 + 4096, .slab_count = slab_count}, 0).value();
    view_ = shm::ArenaView::map(FileDescriptor(::dup(arena_->fd()))).value();
    if (!stage_) stage_ = std::make_unique<CopyStage>(device::open_cuda_device(0).value());
  }

  // A batch of one tensor of 128 MB that holds `value` everywhere.
  std::unique_ptr<Batch> make_batch(int64_t value) {
    const uint32_t slab_index = arena_->try_acquire().value();
    EXPECT_TRUE(arena_->reserve(slab_index, arena_->slab_bytes()));
    auto* numbers = reinterpret_cast<int64_t*>(arena_->slab(slab_index));
    std::fill_n(numbers, kElementCount, value);
    const auto record = wire::make_record({wire::make_entry(4, {kElementCount})}, wire::nest_of_tensors(1));
    constexpr uint64_t kRecordOffset = kElementCount * 8;
    std::memcpy(arena_->slab(slab_index) + kRecordOffset, record.data(), record.size());
    return Batch::from_slab({.is_transient = is_transient_,
                             .record_bytes = static_cast<uint32_t>(record.size()),
                             .record_offset = kRecordOffset,
                             .slab_bytes = arena_->backed_bytes(slab_index)},
                            c10::make_intrusive<SlabLease>(view_, slab_index, arena_->generation(slab_index)),
                            /*allow_pickle=*/true)
        .value();
  }

  bool is_transient_ = false;
  std::shared_ptr<shm::Arena> arena_;
  std::shared_ptr<shm::ArenaView> view_;
  std::unique_ptr<CopyStage> stage_;
};

TEST_F(CudaStageTest, PinnedSlabComesBackOnlyWhenTorchsCopyFromItIsOver) {
  PENSTOCK_NEEDS_CUDA();
  open(1);
  PinStage pin_stage(device::open_cuda_watched_memory(), std::nullopt);
  std::optional<c10::cuda::CUDAStream> stream;
  for (int64_t round = 1; round <= 20; ++round) {
    auto batch = make_batch(round);
    ASSERT_TRUE(pin_stage.begin(*batch));
    at::Tensor pinned = batch->tensors().all().at(0);
    batch.reset();
    EXPECT_TRUE(pinned.is_pinned());
    EXPECT_EQ(static_cast<const void*>(pinned.const_data_ptr()), view_->slab(0));
    // On the stream that is current, and on others.
    stream =
        round % 2 == 0 ? c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0) : c10::cuda::getDefaultCUDAStream(0);
    const c10::cuda::CUDAStreamGuard guard(*stream);
    at::Tensor busy = at::ones({1 << 24}, at::kCUDA);
    for (int count = 0; count < 50; ++count) busy = busy.add(1);
    const at::Tensor copy = pinned.narrow(0, 0, kElementCount / 2).to(at::kCUDA, /*non_blocking=*/true);
    pinned.reset();
    if (pin_stage.reclaim() > 0) {
      EXPECT_EQ(arena_->try_acquire(), std::nullopt);
    }
    stream->synchronize();
    EXPECT_EQ(pin_stage.reclaim(), 0u);
    EXPECT_TRUE(copy.eq(round).all().item<bool>());
  }
}

TEST_F(CudaStageTest, SlowCopyFromAPinnedSlabIsStillUnderWayWhenItsTensorDies) {
  PENSTOCK_NEEDS_CUDA();
  open(1);
  PinStage pin_stage(device::open_cuda_watched_memory(), std::nullopt);
  auto batch = make_batch(1);
  ASSERT_TRUE(pin_stage.begin(*batch));
  at::Tensor busy = at::ones({1 << 28}, at::kCUDA);
  for (int count = 0; count < 200; ++count) busy = busy.add(1);
  const at::Tensor copy = batch->tensors().all().at(0).to(at::kCUDA, /*non_blocking=*/true);
  batch.reset();
  EXPECT_EQ(pin_stage.reclaim(), 1u);
  EXPECT_EQ(arena_->try_acquire(), std::nullopt);
  c10::cuda::getCurrentCUDAStream(0).synchronize();
  EXPECT_EQ(pin_stage.reclaim(), 0u);
  EXPECT_EQ(arena_->try_acquire(), 0u);
}

TEST_F(CudaStageTest, SlabThatACapturedGraphCopiesFromIsNeverWrittenAgain) {
  PENSTOCK_NEEDS_CUDA();
  open(2);
  PinStage pin_stage(device::open_cuda_watched_memory(), std::nullopt);
  auto batch = make_batch(4);
  ASSERT_TRUE(pin_stage.begin(*batch));
  const at::Tensor target = at::empty({kElementCount}, batch->tensors().all().at(0).options().device(at::kCUDA));
  at::cuda::CUDAGraph graph;
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
    graph.capture_begin();
    target.copy_(batch->tensors().all().at(0), /*non_blocking=*/true);
    graph.capture_end();
  }
  batch.reset();
  EXPECT_EQ(pin_stage.reclaim(), 0u);
  make_batch(5);
  for (int replay = 0; replay < 3; ++replay) {
    target.zero_();
    graph.replay();
    EXPECT_TRUE(target.eq(4).all().item<bool>());
  }
}

TEST_F(CudaStageTest, TorchsOwnPinnedMemoryIsProtectedAsBefore) {
  PENSTOCK_NEEDS_CUDA();
  open(1);
  const PinStage pin_stage(device::open_cuda_watched_memory(),
                           std::nullopt);  // its allocator stands in front of torch's
  const auto options = at::TensorOptions().dtype(at::kLong).pinned_memory(true);
  at::Tensor busy = at::ones({1 << 28}, at::kCUDA);
  for (int count = 0; count < 200; ++count) busy = busy.add(1);
  at::Tensor host = at::full({1 << 20}, 7, options);
  const void* const base = host.const_data_ptr();
  const at::Tensor copy = host.to(at::kCUDA, /*non_blocking=*/true);
  host.reset();
  const at::Tensor other = at::full({1 << 20}, 8, options);
  EXPECT_NE(other.const_data_ptr(), base) << "memory was used again while it was read";
  EXPECT_TRUE(copy.eq(7).all().item<bool>());
}

TEST_F(CudaStageTest, TheSlabComesBackOnlyWhenTheCopyIsOver) {
  PENSTOCK_NEEDS_CUDA();
  open(1);
  for (int64_t round = 1; round <= 20; ++round) {
    auto batch = make_batch(round);
    const auto begun = stage_->begin(*batch);
    ASSERT_TRUE(begun) << begun.error().message;
    EXPECT_EQ(batch->tensors().lease(), nullptr);
    EXPECT_EQ(arena_->try_acquire(), std::nullopt) << "nobody has reclaimed yet";
    ASSERT_TRUE(stage_->finish(*batch));
    const at::Tensor tensor = batch->tensors().all().at(0);
    batch.reset();
    c10::cuda::getCurrentCUDAStream(0).synchronize();
    EXPECT_EQ(stage_->reclaim(), 0u);
    EXPECT_TRUE(tensor.eq(round).all().item<bool>());
  }
}

TEST_F(CudaStageTest, TheCurrentStreamOfTheTrainerWaitsForTheCopy) {
  PENSTOCK_NEEDS_CUDA();
  open(3);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, 0));
  for (int64_t round = 1; round <= 20; ++round) {
    auto batch = make_batch(round);
    ASSERT_TRUE(stage_->begin(*batch));
    ASSERT_TRUE(stage_->finish(*batch));
    const at::Tensor is_right = batch->tensors().all().at(0).eq(round).all();  // enqueued right behind the copy
    batch.reset();
    EXPECT_TRUE(is_right.item<bool>());
    stage_->reclaim();
  }
}

TEST_F(CudaStageTest, AStageThatGoesAwayWaitsForItsCopies) {
  PENSTOCK_NEEDS_CUDA();
  open(1);
  auto batch = make_batch(5);
  ASSERT_TRUE(stage_->begin(*batch));
  stage_.reset();
  EXPECT_EQ(arena_->try_acquire(), 0u);
}

TEST_F(CudaStageTest, ArenasThatAreUsedOnceAreNotKeptByTheStage) {
  PENSTOCK_NEEDS_CUDA();
  // Batches above half the arena's cap stayed mapped and pinned for the life of the loader.
  open(1, /*is_transient=*/true);
  auto batch = make_batch(1);
  ASSERT_TRUE(stage_->begin(*batch));
  ASSERT_TRUE(stage_->finish(*batch));
  c10::cuda::getCurrentCUDAStream(0).synchronize();
  stage_->reclaim();
  batch.reset();
  const std::weak_ptr<shm::ArenaView> view = view_;
  view_.reset();
  EXPECT_TRUE(view.expired());
}

TEST_F(CudaStageTest, AnArenaThatWasReplacedIsGivenUpWithTheNextBatch) {
  PENSTOCK_NEEDS_CUDA();
  open(1);
  const std::weak_ptr<shm::ArenaView> replaced = view_;
  for (int64_t round = 1; round <= 2; ++round) {
    auto batch = make_batch(round);
    ASSERT_TRUE(stage_->begin(*batch));
    ASSERT_TRUE(stage_->finish(*batch));
    c10::cuda::getCurrentCUDAStream(0).synchronize();
    stage_->reclaim();
    batch.reset();
    if (round == 1) open(1);
  }
  EXPECT_TRUE(replaced.expired());
}

// Tensors that came with fewer bytes, widened by the kernels.
class CudaWideningTest : public test::SeededTest {
 protected:
  void SetUp() override {
    PENSTOCK_NEEDS_CUDA();
    auto device = device::open_cuda_device(0).value();
    if (!device->can_widen()) GTEST_SKIP() << "this build has no kernels for this device";
    stage_ = std::make_unique<CopyStage>(std::move(device));
  }

  void expect_widened(const std::vector<wire::NarrowSample>& samples) {
    std::vector<wire::TensorEntry> entries;
    std::vector<std::byte> payload;
    for (const auto& sample : samples) {
      entries.push_back(sample.entry);
      payload.insert(payload.end(), sample.narrow.begin(), sample.narrow.end());
      payload.resize(align_up(payload.size(), wire::kPayloadAlignment));
    }
    const auto record = wire::make_record(entries, wire::nest_of_tensors(static_cast<uint32_t>(entries.size())));
    auto batch = Batch::from_parts({}, record, payload, /*allow_pickle=*/false).value();
    ASSERT_TRUE(batch->tensors().check_narrow());
    ASSERT_TRUE(batch->tensors().try_keep_narrow());
    const auto begun = stage_->begin(*batch);
    ASSERT_TRUE(begun) << begun.error().message;
    EXPECT_TRUE(batch->tensors().was_widened_on_device());
    ASSERT_TRUE(stage_->finish(*batch));
    c10::cuda::getCurrentCUDAStream(0).synchronize();
    for (size_t index = 0; index < samples.size(); ++index) {
      const at::Tensor& tensor = batch->tensors().all()[index];
      ASSERT_TRUE(tensor.is_cuda());
      EXPECT_EQ(tensor.sizes(), at::IntArrayRef(samples[index].entry.shape));
      const auto wide = samples[index].widened();
      std::vector<std::byte> found(wide.size());
      ASSERT_EQ(tensor.storage().nbytes(), wide.size());
      ASSERT_EQ(cudaMemcpy(found.data(), tensor.const_data_ptr(), found.size(), cudaMemcpyDeviceToHost), cudaSuccess);
      EXPECT_TRUE(found == wide) << "encoding " << static_cast<int>(samples[index].entry.encoding) << ", dtype "
                                 << static_cast<int>(samples[index].entry.dtype);
    }
    EXPECT_EQ(stage_->reclaim(), 0u);
  }

  std::unique_ptr<CopyStage> stage_;
};

TEST_F(CudaWideningTest, EveryEncodingIsWidenedAsTheCpuWidensIt) {
  for (const uint64_t size_max : {4, 20, 90}) {
    for (int round = 0; round < 50 && !HasFatalFailure(); ++round) {
      std::vector<wire::NarrowSample> samples;
      for (const wire::Encoding encoding : wire::kNarrowEncodings)
        samples.push_back(wire::random_narrow(encoding, size_max, random()));
      expect_widened(samples);
    }
  }
}

TEST_F(CudaWideningTest, LargeTensorsAreWidenedAsTheCpuWidensThem) {
  for (const wire::Encoding encoding : wire::kNarrowEncodings) expect_widened({wire::large_narrow(encoding, random())});
}

#else

TEST(CudaDevice, CopiesToADevice) { GTEST_SKIP() << "this build has no CUDA"; }

#endif

}  // namespace
}  // namespace penstock::loader
