// SPDX-License-Identifier: Apache-2.0
#pragma once
// One batch at the trainer: its record, its tensors, and the copies that a stage has started for it on a device.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "device/device.h"
#include "loader/batch_record.h"
#include "loader/batch_tensors.h"
#include "wire/message.h"

namespace penstock::loader {

class AheadCopies;

// The content of a batch that was made in this process.
struct LocalTensors {
  std::vector<at::Tensor> tensors{};  // on the CPU; boundary tensors last
  std::vector<std::string> boundary_keys{};
  std::vector<std::byte> nest{};
};

// Confined to the thread that holds it: the I/O thread, then the stage thread if there are stages, then the trainer's.
class Batch {
 public:
  // A batch in a slab. `lease` is this process's right to read the slab.
  static Result<std::unique_ptr<Batch>> from_slab(const wire::BatchFacts& facts, c10::intrusive_ptr<SlabLease> lease,
                                                  bool allow_pickle);

  // A batch that was received through a socket.
  static Result<std::unique_ptr<Batch>> from_parts(const wire::BatchFacts& facts, std::vector<std::byte> record,
                                                   std::vector<std::byte> payload, bool allow_pickle);

  // A batch that was made in this process.
  static std::unique_ptr<Batch> from_tensors(const wire::BatchFacts& facts, LocalTensors content);

  static std::unique_ptr<Batch> from_error(const wire::BatchFacts& facts, BatchRecord::RemoteError error);

  explicit Batch(const wire::BatchFacts& facts) : record_(facts) {}

  BatchRecord& record() { return record_; }
  const BatchRecord& record() const { return record_; }
  BatchTensors& tensors() { return tensors_; }
  const BatchTensors& tensors() const { return tensors_; }

  // Leaves out a leaf that this rank does not read. Before the stages.
  void leave_out(size_t index) {
    record_.leave_out(index);
    tensors_.leave_out(index);
  }

  // The completion event of the device work that fills the tensors, if there is any; set by the last stage. Shared with
  // the stage, which waits for it too.
  void set_ready_event(std::shared_ptr<device::DeviceEvent> event) { ready_event_ = std::move(event); }
  std::shared_ptr<device::DeviceEvent> take_ready_event() { return std::exchange(ready_event_, nullptr); }

  // Copies of some of the tensors on a device, started by a stage (copy_stage.h). Null without any.
  void set_ahead(std::shared_ptr<AheadCopies> copies) { ahead_ = std::move(copies); }
  const std::shared_ptr<AheadCopies>& ahead() const { return ahead_; }

  // The batch's share of the staged bytes.
  void set_staged(device::StagedBytes::Share share) { staged_ = std::move(share); }

 private:
  BatchRecord record_;
  BatchTensors tensors_{record_};
  std::shared_ptr<device::DeviceEvent> ready_event_;
  std::shared_ptr<AheadCopies> ahead_;
  device::StagedBytes::Share staged_;
};

}  // namespace penstock::loader
