// SPDX-License-Identifier: Apache-2.0
#pragma once
// One batch at the trainer: its record, and where its bytes are. Tensors are made when the batch is delivered; each has
// a separate storage of exactly its bytes, not resizable, so that saving a tensor never saves the whole slab.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/file_descriptor.h"
#include "base/result.h"
#include "device/device.h"
#include "loader/batch_memory.h"
#include "loader/counters.h"
#include "session/request_order.h"
#include "wire/frame.h"
#include "wire/message.h"
#include "wire/narrow.h"

namespace penstock::loader {

class AheadCopies;
class BatchMemory;

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

  // The error that is raised in the place of a batch of a pool, or of a thread of this process.
  struct RemoteError {
    std::string type_name;
    std::string text;
    std::string worker;             // that raised it; empty if it was the trainer
    std::exception_ptr cause = {};  // the exception itself, if it was thrown in this process
  };
  static std::unique_ptr<Batch> from_error(const wire::BatchFacts& facts, RemoteError error);

  explicit Batch(const wire::BatchFacts& facts) : facts_(facts) {}

  const wire::BatchFacts& facts() const { return facts_; }
  const wire::Frame& frame() const { return frame_; }
  bool raises() const { return (facts_.flags & wire::kBatchRaises) != 0; }
  bool has_state() const { return (facts_.flags & wire::kBatchHasState) != 0; }

  // The batch's worker, and the times of the stages that it has passed so far.
  BatchTimes& times() { return times_; }

  const std::optional<RemoteError>& remote_error() const { return remote_error_; }

  // The state of a pool's dataset after this batch, as encoded by the worker; empty if the dataset has none.
  std::span<const std::byte> state() const { return state_; }
  void set_state(std::span<const std::byte> state) { state_.assign(state.begin(), state.end()); }

  // Where to fetch the batch's withheld leaves: the request that the batch answers, and the worker that made it.
  struct Origin {
    session::SharedContent request;
    uint64_t worker_id = 0;
  };
  const std::optional<Origin>& origin() const { return origin_; }
  void set_origin(Origin origin) { origin_ = std::move(origin); }
  bool is_withheld(size_t index) const { return frame_.tensors[index].encoding == wire::Encoding::kWithheld; }
  // Total bytes of the withheld leaves.
  uint64_t withheld_bytes() const;
  // Bytes that the batch arrived with, including its shared-memory files.
  uint64_t bytes() const;
  // Upper bound on the bytes of its tensors and values, as counted by wire::whole_bytes() and check_nest().
  uint64_t whole_bytes() const { return wire::whole_bytes(frame_) + nest_bytes_; }

  // A shared-memory file that contains tensors of the batch, as passed by their worker. The program that receives the
  // batch may set its storage, so that a file which it has mapped already remains one storage; otherwise tensors() maps
  // the file.
  struct SharedFile {
    FileDescriptor fd;
    uint64_t bytes = 0;
    c10::Storage storage;
  };
  std::vector<SharedFile>& shared_files() { return shared_files_; }
  // Must be called before tensors() if the record refers to files. kMalformed if a tensor extends beyond the end of its
  // file.
  Result<void> set_shared_files(std::vector<FileDescriptor> fds);
  // Gives each tensor in such a file a storage of just its bytes, for a stage that copies it. kNoMemory.
  Result<void> map_for_copy();

  // Finds bools whose bytes are neither 0 nor 1, which code that reads bools need not handle. tensors() changes these
  // bytes to 1. Call it before tensors(), for batches of untrusted workers.
  void find_nonstandard_bools();

  // Null for a batch that arrived through a socket or was copied out.
  const c10::intrusive_ptr<SlabLease>& lease() const { return lease_; }

  // The batch's tensors, boundary tensors last. They view the slab, or separate memory after copy_out(); tensors in
  // shared files view the files. Withheld leaves are meta tensors.
  const std::vector<at::Tensor>& tensors();

  // Whether some tensors are narrow, with fewer bytes than their values need. Before tensors(), such a batch is either
  // widened, or checked and kept narrow if a stage has a device widen it.
  bool is_narrow() const;
  // Bytes of the narrow tensors once they are widened.
  uint64_t wide_bytes() const;
  // Widens the narrow tensors into `memory`, or onto the heap. kMalformed for bytes that are invalid for their tensor,
  // kNoMemory.
  Result<void> widen(BatchMemory& memory);
  // Checks the bytes of the narrow tensors; no other process may write to them from now on. Fails with kMalformed where
  // widen() would fail for any reason except memory.
  Result<void> check_narrow();
  // Keeps the narrow tensors, which must have been checked, as they are. Returns false if a device cannot widen one of
  // them. On the host, tensors() widens them onto the heap.
  [[nodiscard]] bool try_keep_narrow();
  // How to widen a tensor that was kept narrow. Null for other tensors.
  const wire::Widening* widening(size_t index) const;
  // The sources for a stage's copies: the tensors, except that a tensor that was kept narrow is represented by its
  // narrow bytes. As for tensors(), they share the slab or have separate memory.
  std::vector<at::Tensor> copy_sources();
  // One tensor, for a copy in addition to the batch: it shares the slab, and copy_out() may still be called.
  at::Tensor copy_source(size_t index);
  // A meta tensor with the dtype, sizes and strides of a tensor of the batch.
  at::Tensor meta(size_t index) const;
  // Whether a stage had a device widen tensors.
  bool was_widened_on_device() const { return was_widened_on_device_; }
  // Marks the slabs as held: while the program keeps the tensors, the slabs are not overwritten, not even after a fork.
  void mark_held();

  // A digest of the batch's values as they arrived; nullopt if some are withheld, narrow or in shared files, or a
  // tensor has gaps.
  std::optional<ContentDigest::Value> content() const;

  // Puts an object in the place of a withheld leaf.
  void set_stand_in(size_t index, at::Tensor tensor);

  // Copies every tensor on the slab to separate memory and releases the slab.
  void copy_out();
  // Makes copy_out() allocate pinned memory.
  void pin_copies() { pins_copies_ = true; }
  // Whether all tensors lie in one reusable slab, unchanged since their worker wrote them.
  bool is_whole_in_slab() const;

  // Replaces the tensors by copies that a stage has made or started, and drops this batch's lease: a stage whose copy
  // is still running holds the tensors that it reads.
  void replace_tensors(std::vector<at::Tensor> tensors);

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
  Result<void> check_withheld() const;
  Result<void> read_record(std::span<const std::byte> record, uint64_t payload_bytes_max, bool allow_pickle);
  std::span<const std::byte> bytes_of(const wire::TensorEntry& entry) const;
  at::Tensor make(size_t index);
  at::Tensor make_plain(const wire::TensorEntry& entry);
  const c10::Storage& storage_of(const wire::TensorEntry& entry);

  wire::BatchFacts facts_;
  BatchTimes times_;
  c10::intrusive_ptr<SlabLease> lease_;
  std::vector<std::byte> record_;  // the frame's views point here
  std::vector<std::string> keys_;  // of a batch made in this process; the frame's views point here, too
  std::vector<std::byte> payload_;
  wire::Frame frame_;
  uint64_t nest_bytes_ = 0;          // size of the record's values, as counted by check_nest()
  std::vector<at::Tensor> tensors_;  // undefined until tensors() makes them
  std::vector<SharedFile> shared_files_;
  std::shared_ptr<device::DeviceEvent> ready_event_;
  std::shared_ptr<AheadCopies> ahead_;
  device::StagedBytes::Share staged_;
  std::optional<RemoteError> remote_error_;
  std::vector<std::byte> state_;
  std::optional<Origin> origin_;
  c10::intrusive_ptr<SlabLease> wide_lease_;  // of the widened tensors
  std::vector<at::Tensor> wide_;              // by index; undefined for the other tensors
  std::vector<wire::Widening> widenings_;     // by index, for the checked tensors; empty without any
  std::vector<bool> nonstandard_bools_;       // by index: plain bools to be copied and corrected; empty without any
  bool keeps_narrow_ = false;                 // the checked tensors stay narrow
  bool was_widened_on_device_ = false;
  bool pins_copies_ = false;
};

}  // namespace penstock::loader
