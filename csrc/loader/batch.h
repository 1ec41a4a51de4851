// SPDX-License-Identifier: Apache-2.0
#pragma once
// One batch at the trainer: its record, and where its bytes are. Tensors are made when the batch is delivered; each has
// a storage of its own of exactly its bytes, not resizable, so that saving one never saves the slab.

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

#include "base/content_digest.h"
#include "base/file_descriptor.h"
#include "base/result.h"
#include "cluster/request_content.h"
#include "loader/batch_times.h"
#include "loader/device.h"
#include "loader/slab_lease.h"
#include "loader/staged_bytes.h"
#include "wire/batch_facts.h"
#include "wire/frame.h"
#include "wire/widening.h"

namespace penstock::loader {

class AheadCopies;
class BatchMemory;

// The content of a batch that was made in this process.
struct LocalTensors {
  std::vector<at::Tensor> tensors{};  // boundary tensors last; of the CPU
  std::vector<std::string> boundary_keys{};
  std::vector<std::byte> nest{};
};

// Confined to the thread that holds it: the I/O thread, that of the stages if there are any, and then the trainer's.
class Batch {
 public:
  // A batch in a slab. `lease` is this process's right to read it.
  static Result<std::unique_ptr<Batch>> from_slab(const wire::BatchFacts& facts, c10::intrusive_ptr<SlabLease> lease,
                                                  bool allow_pickle);

  // A batch that came through the socket.
  static Result<std::unique_ptr<Batch>> from_parts(const wire::BatchFacts& facts, std::vector<std::byte> record,
                                                   std::vector<std::byte> payload, bool allow_pickle);

  // A batch that was made in this process.
  static std::unique_ptr<Batch> from_tensors(const wire::BatchFacts& facts, LocalTensors content);

  // The error that is raised in the place of a batch of a pool, or of a thread of this process.
  struct RemoteError {
    std::string type_name;
    std::string text;
    std::string worker;             // that raised it; empty if the trainer did
    std::exception_ptr cause = {};  // the exception itself, if it was thrown in this process
  };
  static std::unique_ptr<Batch> from_error(const wire::BatchFacts& facts, RemoteError error);

  explicit Batch(const wire::BatchFacts& facts) : facts_(facts) {}

  const wire::BatchFacts& facts() const { return facts_; }
  const wire::Frame& frame() const { return frame_; }
  bool raises() const { return (facts_.flags & wire::kBatchRaises) != 0; }
  bool has_state() const { return (facts_.flags & wire::kBatchHasState) != 0; }

  // Who made it, and when it was where, as far as it has come.
  BatchTimes& times() { return times_; }

  const std::optional<RemoteError>& remote_error() const { return remote_error_; }

  // The state of a pool's dataset after this batch, as the worker has encoded it; empty if it has none.
  std::span<const std::byte> state() const { return state_; }
  void set_state(std::span<const std::byte> state) { state_.assign(state.begin(), state.end()); }

  // Where the leaves are that the batch came without: the request that it is the answer to, and the worker that made
  // it.
  struct Origin {
    cluster::SharedContent request;
    uint64_t worker_id = 0;
  };
  const std::optional<Origin>& origin() const { return origin_; }
  void set_origin(Origin origin) { origin_ = std::move(origin); }
  bool is_withheld(size_t index) const { return frame_.tensors[index].encoding == wire::Encoding::kWithheld; }
  // Bytes that the leaves which were left out have.
  uint64_t withheld_bytes() const;
  // Bytes that the batch came with, those in files in shared memory included.
  uint64_t bytes() const;
  // The most that its tensors and values come to, as wire::whole_bytes() and check_nest() count them.
  uint64_t whole_bytes() const { return wire::whole_bytes(frame_) + nest_bytes_; }

  // A file in shared memory in which tensors of the batch lie, as their worker has passed it. The program that the
  // batch is delivered to may set its storage, so that a file which it has mapped already is one storage; without one,
  // tensors() maps the file.
  struct SharedFile {
    FileDescriptor fd;
    uint64_t bytes = 0;
    c10::Storage storage;
  };
  std::vector<SharedFile>& shared_files() { return shared_files_; }
  // To be called before tensors() for a record that refers to files. kMalformed when tensors lie beyond their end.
  Result<void> set_shared_files(std::vector<FileDescriptor> fds);
  // Gives the tensors in such files storages of just their own bytes, for a stage that copies them. kNoMemory.
  Result<void> map_for_copy();

  // Looks for bools whose bytes are neither 0 nor 1, which code for bools need not expect. tensors() makes them true.
  // For batches of workers that are not trusted, before tensors().
  void find_odd_bools();

  // Null for a batch that came through the socket or was copied out.
  const c10::intrusive_ptr<SlabLease>& lease() const { return lease_; }

  // The batch's tensors, boundary tensors last. They view the slab, or memory of their own after copy_out(); those in
  // shared files view these. Those of leaves that were left out are meta tensors.
  const std::vector<at::Tensor>& tensors();

  // Whether some tensors came with fewer bytes than they have. Before tensors(), such a batch is widened, or checked
  // and kept narrow where a stage has a device widen it.
  bool is_narrow() const;
  // Bytes of those tensors once they are widened.
  uint64_t wide_bytes() const;
  // Gives tensors that came with fewer bytes their own ones, in `memory` or else on the heap. kMalformed for bytes that
  // do not belong to such a tensor, kNoMemory.
  Result<void> widen(BatchMemory& memory);
  // Checks the bytes of such tensors, which no other process may write to from now on. kMalformed where widen() fails
  // for anything but memory.
  Result<void> check_narrow();
  // Leaves such tensors, which were checked, as they came. False where a device cannot widen one of them. On the host
  // tensors() widens them onto the heap.
  [[nodiscard]] bool try_keep_narrow();
  // Of a tensor that was left as it came: how it is widened. Null for the others.
  const wire::Widening* widening(size_t index) const;
  // What a stage copies: the tensors, and in the place of those that were left as they came their narrow bytes. As
  // tensors(), they share the slab or have memory of their own.
  std::vector<at::Tensor> copy_sources();
  // One tensor, for a copy beside the batch: it shares the slab, which copy_out() may still leave.
  at::Tensor copy_source(size_t index);
  // A tensor on no device with the dtype, sizes and strides of a tensor of the batch.
  at::Tensor meta(size_t index) const;
  // Whether a stage had a device widen tensors.
  bool was_widened_on_device() const { return was_widened_on_device_; }
  // Whether a program that keeps the tensors keeps the slab from being written again, also across a fork.
  void mark_held();

  // A digest of its values as they came; none where some were left out, or have fewer bytes than their tensors.
  std::optional<ContentDigest::Value> content() const;

  // Puts an object in the place of a leaf that was left out.
  void set_stand_in(size_t index, at::Tensor tensor);

  // Copies every tensor on the slab to memory of its own and gives the slab back.
  void copy_out();
  // Has copy_out() take pinned memory.
  void pin_copies() { pins_copies_ = true; }
  // Whether all tensors lie in one slab, which is used again, as their worker wrote them.
  bool is_whole_in_slab() const;

  // Replaces the tensors by copies that a stage has made or begun, and drops this batch's lease: a stage whose copy is
  // still under way holds the tensors that it reads.
  void replace_tensors(std::vector<at::Tensor> tensors);

  // The end of the work on a device that fills the tensors, if there is any: the last stage's. Shared with the stage,
  // which waits for it too.
  void set_ready_event(std::shared_ptr<DeviceEvent> event) { ready_event_ = std::move(event); }
  std::shared_ptr<DeviceEvent> take_ready_event() { return std::exchange(ready_event_, nullptr); }

  // Copies of some of the tensors on a device, which a stage has begun (ahead_stage.h). Null without any.
  void set_ahead(std::shared_ptr<AheadCopies> copies) { ahead_ = std::move(copies); }
  const std::shared_ptr<AheadCopies>& ahead() const { return ahead_; }

  // The batch's share of what the stages hold ready.
  void set_staged(StagedBytes::Share share) { staged_ = std::move(share); }

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
  std::vector<std::string> keys_;  // of a batch of this process; here, too
  std::vector<std::byte> payload_;
  wire::Frame frame_;
  uint64_t nest_bytes_ = 0;          // as check_nest() counts the values of a record
  std::vector<at::Tensor> tensors_;  // undefined where tensors() has not made them yet
  std::vector<SharedFile> shared_files_;
  std::shared_ptr<DeviceEvent> ready_event_;
  std::shared_ptr<AheadCopies> ahead_;
  StagedBytes::Share staged_;
  std::optional<RemoteError> remote_error_;
  std::vector<std::byte> state_;
  std::optional<Origin> origin_;
  c10::intrusive_ptr<SlabLease> wide_lease_;  // of tensors that were widened
  std::vector<at::Tensor> wide_;              // by place; undefined for the others
  std::vector<wire::Widening> widenings_;     // by place, of tensors that were checked; empty without any
  std::vector<bool> odd_bools_;               // by place, of plain bools that are copied for it; empty without any
  bool keeps_narrow_ = false;                 // leaves the tensors that were checked as they came
  bool was_widened_on_device_ = false;
  bool pins_copies_ = false;
};

}  // namespace penstock::loader
