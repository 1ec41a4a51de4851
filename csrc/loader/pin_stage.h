// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stage for pin_memory=True. A batch in a slab is not copied: the slab is registered with the driver once, which
// makes it pinned memory, and the batch's tensors stay on it. Torch's events protect only memory of torch's allocator,
// so the slab is released to its worker when the last tensor has died *and* the copies that the program has started
// from it are finished (WatchedMemory). Batches without such a slab are copied into torch's pinned memory by this
// thread, as torch does on a Python thread: batches that arrived through a socket, in a single-use arena, or in shared
// files, widened tensors, and batches beyond the slabs that the program may hold.
//
// Copying each batch was tried: one memcpy on one thread reaches a fifth of the rate of a registered slab
// (bench/gpu.py).

#include <memory>
#include <optional>

#include "device/device.h"
#include "loader/batch_stage.h"

namespace penstock::loader {

class PinnedSlabs;

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
