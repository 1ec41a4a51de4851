// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stage behind device=: starts the copy of a batch to a device, from slabs that the device reads by itself, and
// behind it the widening of what came with fewer bytes. Memory for all of that is taken first: a batch that has only
// some of it never waits on the device for the rest. A leaf that stayed with its worker takes none: its meta tensor
// stays in its place.
//
// Slabs are leased until the copies from them are over (copies_under_way.h). Tensors on the device are torch's, and are
// kept for the stream that the trainer reads them on.

#include <memory>
#include <vector>

#include "loader/batch_stage.h"
#include "loader/copies_under_way.h"
#include "loader/device.h"
#include "loader/slab_registrations.h"

namespace penstock::loader {

// As BatchStage. The destructor waits for the copies under way.
class CopyStage final : public BatchStage {
 public:
  explicit CopyStage(std::unique_ptr<Device> device);

  Result<void> begin(Batch& batch) override;
  Result<void> finish(Batch& batch) override;
  bool takes_narrow() const override { return takes_narrow_; }
  size_t reclaim() override { return copies_.reclaim(); }

  // As CopiesUnderWay.
  size_t retired_count() const { return copies_.retired_count(); }

 private:
  // On the device, for one tensor. What is not the tensor's own is freed once the work on it was started.
  struct Room {
    at::Tensor tensor;
    at::Tensor narrow;   // undefined unless the device widens it
    at::Tensor scratch;  // undefined where none is needed
  };

  Result<std::vector<Room>> allocate(const Batch& batch, const std::vector<at::Tensor>& sources);
  Result<Room> allocate_one(const Batch& batch, size_t index, const at::Tensor& source);
  Result<void> start(const Batch& batch, const std::vector<at::Tensor>& sources, const std::vector<Room>& rooms);

  std::unique_ptr<Device> device_;
  const bool takes_narrow_;
  SlabRegistrations registrations_;
  CopiesUnderWay copies_;
};

}  // namespace penstock::loader
