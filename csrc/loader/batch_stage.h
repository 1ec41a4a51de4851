// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stages that a batch passes between its arrival and the trainer (stage_chain.h). BatchStage is their interface.
// PinStage delivers batches in pinned memory; the stages that copy batches to a device are in copy_stage.h.

#include <cstddef>
#include <memory>
#include <optional>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "device/device.h"
#include "loader/batch.h"

namespace penstock::loader {

// finish() is for the trainer's thread, takes_narrow() for any, the rest for the chain's.
class BatchStage {
 public:
  BatchStage() = default;
  BatchStage(const BatchStage&) = delete;
  BatchStage& operator=(const BatchStage&) = delete;
  virtual ~BatchStage() = default;

  // On return the batch has its final tensors, though a device may still be filling them. kNoMemory leaves the batch
  // unchanged, for another attempt. After any other error the batch must be dropped, which releases no memory that is
  // still being read.
  virtual Result<void> begin(Batch& batch) = 0;

  // Called just before the trainer receives the batch: its operations on the tensors run after their copy from now on.
  virtual Result<void> finish(Batch& batch) = 0;

  // Whether begin() accepts batches with tensors that were kept narrow (Batch::try_keep_narrow).
  virtual bool takes_narrow() const = 0;

  // Releases the memory that finished copies have read. Returns the number of copies that are still running.
  virtual size_t reclaim() = 0;

  // Called before the first batch: `waker` wakes the chain's thread for a reclaim() until the stage is destroyed.
  virtual void set_waker(Waker&) {}
};

class PinnedSlabs;

// The stage for pin_memory=True. A batch in a slab is not copied: the slab is registered with the driver once, which
// makes it pinned memory, and the batch's tensors stay on it. Torch's events protect only memory of torch's allocator,
// so the slab is released to its worker when the last tensor has died *and* the copies that the program has started
// from it are finished (WatchedMemory). Batches without such a slab are copied into torch's pinned memory by this
// thread, as torch does on a Python thread: batches that arrived through a socket, in a single-use arena, or in shared
// files, widened tensors, and batches beyond the slabs that the program may hold.
//
// Copying each batch was tried: one memcpy on one thread reaches a fifth of the rate of a registered slab
// (bench/gpu.py).
//
// Same threads as BatchStage.
class PinStage final : public BatchStage {
 public:
  // `memory` is null if the end of copies from registered memory cannot be observed; then every batch is copied.
  // `owed_slab_count` is the number of an arena's slabs that its worker needs for its answers; nullopt if an arena
  // grows with the number of held slabs.
  PinStage(std::unique_ptr<device::WatchedMemory> memory, std::optional<uint32_t> owed_slab_count);
  // Waits for copies from slabs that have no tensors any more.
  ~PinStage() override;

  Result<void> begin(Batch& batch) override;
  Result<void> finish(Batch&) override { return {}; }
  bool takes_narrow() const override { return false; }
  size_t reclaim() override;
  void set_waker(Waker& waker) override;

 private:
  bool try_pin(Batch& batch);

  const std::shared_ptr<PinnedSlabs> slabs_;  // shared with the leases of pinned slabs
  const std::optional<uint32_t> owed_slab_count_;
};

}  // namespace penstock::loader
