// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stage for device=: it starts the copy of a batch to a device, from slabs that the device reads directly, and
// after the copy the widening of narrow tensors. All memory is allocated first, so a batch never holds some memory on
// the device while it waits for the rest. A withheld leaf needs no memory: its meta tensor stays in its place.
//
// Slabs are leased until the copies from them are finished (copies_under_way.h). Tensors on the device belong to
// torch's allocator, and are kept for the stream on which the trainer reads them.

#include <memory>
#include <vector>

#include "device/device.h"
#include "loader/batch_stage.h"
#include "loader/copies_under_way.h"
#include "loader/slab_registrations.h"

namespace penstock::loader {

// Same threads as BatchStage. The destructor waits for the running copies.
class CopyStage final : public BatchStage {
 public:
  explicit CopyStage(std::unique_ptr<device::Device> device);

  Result<void> begin(Batch& batch) override;
  Result<void> finish(Batch& batch) override;
  bool takes_narrow() const override { return takes_narrow_; }
  size_t reclaim() override { return copies_.reclaim(); }

  // See CopiesUnderWay.
  size_t retired_count() const { return copies_.retired_count(); }

 private:
  // Device memory for one tensor. `narrow` and `scratch` are freed once the work on them was started.
  struct Room {
    at::Tensor tensor;
    at::Tensor narrow;   // undefined unless the device widens it
    at::Tensor scratch;  // undefined if none is needed
  };

  Result<std::vector<Room>> allocate(const Batch& batch, const std::vector<at::Tensor>& sources);
  Result<Room> allocate_one(const Batch& batch, size_t index, const at::Tensor& source);
  Result<void> start(const Batch& batch, const std::vector<at::Tensor>& sources, const std::vector<Room>& rooms);

  std::unique_ptr<device::Device> device_;
  const bool takes_narrow_;
  SlabRegistrations registrations_;
  CopiesUnderWay copies_;
};

}  // namespace penstock::loader
