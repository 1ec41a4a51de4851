// SPDX-License-Identifier: Apache-2.0
#include "loader/batch_stage.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "device/cuda_device.h"
#include "loader/copy_stage.h"

namespace penstock::loader {

// The registered slabs, and the slabs that wait for the end of copies. Tensors may outlive the stage: the slabs stay
// registered as long as one tensor is left, and after close() the last tensor on a slab waits for the copies from it.
// Thread-safe.
class PinnedSlabs final : public SlabKeeper, public std::enable_shared_from_this<PinnedSlabs> {
 public:
  explicit PinnedSlabs(std::unique_ptr<device::WatchedMemory> memory)
      : memory_(std::move(memory)),
        owner_pid_(::getpid()),
        registrations_(std::make_unique<SlabRegistrations>(*memory_)) {}

  ~PinnedSlabs() override {
    // In a forked child the registrations are the parent's.
    if (::getpid() != owner_pid_) static_cast<void>(registrations_.release());
  }

  // Registers the first `bytes` of the slab and becomes its keeper.
  bool try_pin(const c10::intrusive_ptr<SlabLease>& lease, uint64_t bytes) {
    {
      const MutexLock lock(mutex_);
      if (!registrations_->add(lease, bytes)) return false;
    }
    lease->set_keeper(shared_from_this());
    return true;
  }

  // `waker` wakes the thread that calls reclaim() when a slab starts to wait.
  void set_waker(Waker& waker) {
    const MutexLock lock(mutex_);
    waker_ = &waker;
  }

  void lease_ended(std::shared_ptr<shm::ArenaView> view, uint32_t slab_index, uint32_t generation) override {
    Ended ended{.view = std::move(view), .slab_index = slab_index, .generation = generation};
    auto reads = memory_->reads(ended.base());
    if (reads == device::WatchedMemory::Reads::kInProgress) {
      const MutexLock lock(mutex_);
      if (!is_closed_) {
        // The program does not hold the slab, so later batches need not be copied: their worker waits for the device.
        // Copying them instead was slower: 0.3 of the rate of device= if the loop was ahead of the device.
        ended.view->set_held(slab_index, false);
        waiting_.push_back(std::move(ended));
        if (waker_ != nullptr) waker_->wake();
        return;
      }
    }
    if (reads == device::WatchedMemory::Reads::kInProgress) reads = memory_->wait_for_reads(ended.base());
    give_back(std::move(ended), reads);
  }

  // Releases slabs whose copies are finished. Returns how many still wait.
  size_t reclaim() {
    std::vector<Ended> waiting = take_waiting(/*closes=*/false);
    std::vector<Ended> still_waiting;
    for (Ended& ended : waiting) {
      const auto reads = memory_->reads(ended.base());
      if (reads == device::WatchedMemory::Reads::kInProgress) {
        still_waiting.push_back(std::move(ended));
      } else {
        give_back(std::move(ended), reads);
      }
    }
    const MutexLock lock(mutex_);
    for (Ended& ended : still_waiting) waiting_.push_back(std::move(ended));
    return waiting_.size();
  }

  // No calls of reclaim() follow. Blocks until the copies from waiting slabs are finished.
  void close() {
    for (Ended& ended : take_waiting(/*closes=*/true)) {
      const auto reads = memory_->wait_for_reads(ended.base());
      give_back(std::move(ended), reads);
    }
  }

 private:
  struct Ended {
    std::shared_ptr<shm::ArenaView> view;  // shared with the client and the leases
    uint32_t slab_index;
    uint32_t generation;

    std::byte* base() const { return view->slab(slab_index); }
  };

  static void give_back(Ended ended, device::WatchedMemory::Reads reads) {
    if (reads == device::WatchedMemory::Reads::kNone) return ended.view->release(ended.slab_index, ended.generation);
    ended.view->retire(ended.slab_index);
    keep_until_exit(std::move(ended.view));
  }

  std::vector<Ended> take_waiting(bool closes) {
    const MutexLock lock(mutex_);
    if (closes) {
      is_closed_ = true;
      waker_ = nullptr;
    }
    return std::exchange(waiting_, {});
  }

  const std::unique_ptr<device::WatchedMemory> memory_;
  const pid_t owner_pid_;
  Mutex mutex_;
  std::unique_ptr<SlabRegistrations> registrations_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<Ended> waiting_ PENSTOCK_GUARDED_BY(mutex_);
  Waker* waker_ PENSTOCK_GUARDED_BY(mutex_) = nullptr;  // of the stage's thread, until close()
  bool is_closed_ PENSTOCK_GUARDED_BY(mutex_) = false;
};

PinStage::PinStage(std::unique_ptr<device::WatchedMemory> memory, std::optional<uint32_t> owed_slab_count)
    : slabs_(memory ? std::make_shared<PinnedSlabs>(std::move(memory)) : nullptr), owed_slab_count_(owed_slab_count) {}

PinStage::~PinStage() {
  if (slabs_) slabs_->close();
}

void PinStage::set_waker(Waker& waker) {
  if (slabs_) slabs_->set_waker(waker);
}

size_t PinStage::reclaim() { return slabs_ ? slabs_->reclaim() : 0; }

bool PinStage::try_pin(Batch& batch) {
  if (!slabs_ || !batch.tensors().is_whole_in_slab()) return false;
  const shm::ArenaView& view = batch.tensors().lease()->view();
  // The client would copy the batch out on delivery, on the trainer's thread.
  if (owed_slab_count_ && view.held_count() >= shm::spare_slab_count(view.alive_count(), *owed_slab_count_))
    return false;
  if (!slabs_->try_pin(batch.tensors().lease(), batch.record().facts().slab_bytes)) return false;
  batch.tensors().pin_copies();
  return true;
}

Result<void> PinStage::begin(Batch& batch) {
  const device::RelaxedCapture
      relaxed;  // torch requests pinned memory from the driver, and asks whether used memory is free
  try {
    if (try_pin(batch)) return {};
    // Torch treats no memory as pinned until it has initialised the device.
    if (const auto accelerator = at::getAccelerator()) at::globalContext().lazyInitDevice(*accelerator);
    if (auto mapped = batch.tensors().map_for_copy(); !mapped) return mapped;
    std::vector<at::Tensor> pinned;
    pinned.reserve(batch.tensors().all().size());
    for (const at::Tensor& tensor : batch.tensors().all()) {
      if (tensor.is_meta()) {  // a withheld leaf
        pinned.push_back(tensor);
        continue;
      }
      pinned.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().pinned_memory(true)));
      pinned.back().copy_(tensor);
    }
    batch.tensors().replace(std::move(pinned));
  } catch (const c10::Error& error) {
    return Fault{Errc::kFailed,
                 std::string("copying a batch to pinned memory failed: ") + error.what_without_backtrace()};
  }
  return {};
}

}  // namespace penstock::loader
