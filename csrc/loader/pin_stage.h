// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stage behind pin_memory=True. A batch in a slab is not copied: the slab is registered with the driver once, which
// makes it pinned memory, and the batch's tensors stay on it. Torch's events protect only memory of its own allocator,
// so the slab goes back to its worker when the last tensor has died *and* the copies that the program has started from
// it are over (WatchedMemory). What lies in no such slab is copied into torch's pinned memory by this thread, as torch
// does on a thread of Python's: batches that came through a socket, in an arena that is used once, or in shared files,
// tensors that were widened, and batches beyond the slabs that the program may hold.
//
// Copying each batch was tried: one memcpy on one thread gives a fifth of the rate of a registered slab
// (bench/gpu.py).

#include <memory>
#include <optional>

#include "loader/batch_stage.h"
#include "loader/device.h"

namespace penstock::loader {

class PinnedSlabs;

// As BatchStage.
class PinStage final : public BatchStage {
 public:
  // `memory` is null where nothing tells when a copy from registered memory is over; then every batch is copied.
  // `owed_slab_count` is how many slabs of an arena its worker needs for its answers, nothing where an arena grows
  // with what is held.
  PinStage(std::unique_ptr<WatchedMemory> memory, std::optional<uint32_t> owed_slab_count);
  // Waits for copies from slabs that no tensor is on any more.
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
