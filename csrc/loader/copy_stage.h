// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stage behind device=: starts the copy of a batch to a device, from slabs that the device reads by itself, and
// behind it the widening of what came with fewer bytes. Memory for all of that is taken first: a batch that has only
// some of it never waits on the device for the rest.
//
// Ownership: a slab that a copy reads is leased by the stage until the copy is known to be over, by its event or by a
// wait for all copies. If neither can be had, the device is lost to this process and may go on reading for as long as
// it likes: such slabs stay mapped, and are retired, so that no worker ever writes to them again. Tensors on the device
// are torch's, and are kept for the stream that the trainer reads them on.

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "loader/batch_stage.h"
#include "loader/device.h"
#include "loader/slab_registrations.h"

namespace penstock::loader {

// As BatchStage. The destructor waits for the copies under way.
class CopyStage final : public BatchStage {
 public:
  explicit CopyStage(std::unique_ptr<Device> device);
  ~CopyStage() override;

  Result<void> begin(Batch& batch) override;
  Result<void> finish(Batch& batch) override;
  bool takes_narrow() const override { return takes_narrow_; }
  size_t reclaim() override;

  // Slabs that are never given back, since the device was lost while it might have read them.
  size_t retired_count() const { return retired_count_; }

 private:
  // The sources of one copy: the host tensors share the slab's lease.
  struct Copy {
    std::shared_ptr<DeviceEvent> event;  // shared with the batch, until the trainer is given it
    c10::intrusive_ptr<SlabLease> lease;
    std::vector<at::Tensor> sources;
  };

  // On the device, for one tensor. What is not the tensor's own is freed once the work on it was started.
  struct Room {
    at::Tensor tensor;
    at::Tensor narrow;   // undefined unless the device widens it
    at::Tensor scratch;  // undefined where none is needed
  };

  Result<std::vector<Room>> allocate(const Batch& batch, const std::vector<at::Tensor>& sources);
  Result<Room> allocate_one(const Batch& batch, size_t index, const at::Tensor& source);
  Result<void> start(const Batch& batch, const std::vector<at::Tensor>& sources, const std::vector<Room>& rooms);
  Fault give_up(Copy copy, const Fault& cause);
  void settle();
  void lose(const std::string& cause);
  Fault loss() const;

  std::unique_ptr<Device> device_;
  const bool takes_narrow_;
  SlabRegistrations registrations_;
  std::deque<Copy> copies_;
  std::string loss_;  // its cause; empty while the device is there
  size_t retired_count_ = 0;
};

}  // namespace penstock::loader
