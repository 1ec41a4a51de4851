// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only door to device streams. A stage takes a batch as it arrives and starts the copy that the trainer asked for:
// to torch's pinned memory, or to a CUDA device on a side stream from slabs that are registered with the driver.
//
// Ownership: a slab that a device copy reads is leased by the stage until the event recorded after the copy has
// completed; only then does it go back to its worker. Tensors on the device belong to torch's caching allocator and are
// marked as used by the stream that the trainer reads them on.

#include <chrono>
#include <memory>

#include "base/result.h"
#include "loader/batch.h"

namespace penstock::loader {

// How often reclaim() is asked while copies are under way.
inline constexpr std::chrono::milliseconds kReclaimInterval{1};

// begin() and reclaim() are confined to the I/O thread, finish() to the trainer's.
class BatchStage {
 public:
  virtual ~BatchStage() = default;

  // Starts copying. On return the batch has its final tensors, though a device may still be filling them.
  virtual Result<void> begin(Batch& batch) = 0;

  // Makes the trainer's current stream wait for the copy. Does not block the host.
  virtual void finish(Batch& batch) = 0;

  // Gives back the slabs whose copies are over. Returns how many copies are still under way.
  virtual size_t reclaim() = 0;
};

// Copies into torch's pinned host memory, so that `x.cuda(non_blocking=True)` is protected by torch's own events.
std::unique_ptr<BatchStage> make_pin_stage();

// Copies to CUDA device `device_index`. kUnsupported in a build without CUDA or where no such device is.
Result<std::unique_ptr<BatchStage>> make_cuda_stage(int device_index);

}  // namespace penstock::loader
