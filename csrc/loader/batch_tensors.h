// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the bytes of one batch's tensors are: in a slab, in memory of this process, in shared files, on a device.
// Tensors are made when the batch is delivered; each has a separate storage of exactly its bytes, not resizable, so
// that saving a tensor never saves the whole slab.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/file_descriptor.h"
#include "base/result.h"
#include "loader/batch_memory.h"
#include "loader/batch_record.h"
#include "wire/frame.h"
#include "wire/narrow.h"

namespace penstock::loader {

class BatchTensors {
 public:
  // `record` describes the tensors, and outlives this object.
  explicit BatchTensors(const BatchRecord& record) : record_(record) {}
  BatchTensors(const BatchTensors&) = delete;
  BatchTensors& operator=(const BatchTensors&) = delete;

  // Sets where the bytes are, one of three: in a slab, of which `lease` is this process's right to read it; received
  // through a socket; or in tensors of this process, on the CPU.
  void set_lease(c10::intrusive_ptr<SlabLease> lease) { lease_ = std::move(lease); }
  void set_payload(std::vector<std::byte> payload) { payload_ = std::move(payload); }
  void set_made(std::vector<at::Tensor> tensors) { tensors_ = std::move(tensors); }

  // Null for a batch that arrived through a socket or was copied out.
  const c10::intrusive_ptr<SlabLease>& lease() const { return lease_; }

  // The batch's tensors, boundary tensors last. They view the slab, or separate memory after copy_out(); tensors in
  // shared files view the files. Withheld leaves are meta tensors.
  const std::vector<at::Tensor>& all();
  // A meta tensor with the dtype, sizes and strides of a tensor of the batch.
  at::Tensor meta(size_t index) const;
  // Forgets a tensor that the record has left out: a meta tensor takes its place.
  void leave_out(size_t index) {
    if (index < tensors_.size()) tensors_[index] = at::Tensor();
  }
  // Puts an object in the place of a withheld leaf.
  void set_stand_in(size_t index, at::Tensor tensor);

  // A shared-memory file that contains tensors of the batch, as passed by their worker. The program that receives the
  // batch may set its storage, so that a file which it has mapped already remains one storage; otherwise all() maps
  // the file.
  struct SharedFile {
    FileDescriptor fd;
    uint64_t bytes = 0;
    c10::Storage storage;
  };
  std::vector<SharedFile>& shared_files() { return shared_files_; }
  // Must be called before all() if the record refers to files. kMalformed if a tensor extends beyond the end of its
  // file.
  Result<void> set_shared_files(std::vector<FileDescriptor> fds);
  // Gives each tensor in such a file a storage of just its bytes, for a stage that copies it. kNoMemory.
  Result<void> map_for_copy();

  // Finds bools whose bytes are neither 0 nor 1, which code that reads bools need not handle. all() changes these bytes
  // to 1. Call it before all(), for batches of untrusted workers.
  void find_nonstandard_bools();

  // Before all(), a batch with narrow tensors is either widened, or checked and kept narrow if a stage has a device
  // widen it.
  //
  // Widens the narrow tensors into `memory`, or onto the heap. kMalformed for bytes that are invalid for their tensor,
  // kNoMemory.
  Result<void> widen(BatchMemory& memory);
  // Checks the bytes of the narrow tensors; no other process may write to them from now on. Fails with kMalformed where
  // widen() would fail for any reason except memory.
  Result<void> check_narrow();
  // Keeps the narrow tensors, which must have been checked, as they are. Returns false if a device cannot widen one of
  // them. On the host, all() widens them onto the heap.
  [[nodiscard]] bool try_keep_narrow();
  // How to widen a tensor that was kept narrow. Null for other tensors.
  const wire::Widening* widening(size_t index) const;
  // Whether a stage had a device widen tensors.
  bool was_widened_on_device() const { return was_widened_on_device_; }

  // The sources for a stage's copies: the tensors, except that a tensor that was kept narrow is represented by its
  // narrow bytes. As for all(), they share the slab or have separate memory.
  std::vector<at::Tensor> copy_sources();
  // One tensor, for a copy in addition to the batch: it shares the slab, and copy_out() may still be called.
  at::Tensor copy_source(size_t index);
  // Replaces the tensors by copies that a stage has made or started, and drops this batch's lease: a stage whose copy
  // is still running holds the tensors that it reads.
  void replace(std::vector<at::Tensor> tensors);

  // Copies every tensor on the slab to separate memory and releases the slab.
  void copy_out();
  // Makes copy_out() allocate pinned memory.
  void pin_copies() { pins_copies_ = true; }
  // Marks the slabs as held: while the program keeps the tensors, the slabs are not overwritten, not even after a fork.
  void mark_held();
  // Whether all tensors lie in one reusable slab, unchanged since their worker wrote them.
  bool is_whole_in_slab() const;

  // A digest of the batch's values as they arrived; nullopt if some are withheld, narrow or in shared files, or a
  // tensor has gaps.
  std::optional<ContentDigest::Value> content() const;

 private:
  std::span<const std::byte> bytes_of(const wire::TensorEntry& entry) const;
  at::Tensor make(size_t index);
  at::Tensor make_plain(const wire::TensorEntry& entry);
  const c10::Storage& storage_of(const wire::TensorEntry& entry);

  const BatchRecord& record_;
  c10::intrusive_ptr<SlabLease> lease_;
  std::vector<std::byte> payload_;
  std::vector<at::Tensor> tensors_;  // undefined until all() makes them
  std::vector<SharedFile> shared_files_;
  c10::intrusive_ptr<SlabLease> wide_lease_;  // of the widened tensors
  std::vector<at::Tensor> wide_;              // by index; undefined for the other tensors
  std::vector<wire::Widening> widenings_;     // by index, for the checked tensors; empty without any
  std::vector<bool> nonstandard_bools_;       // by index: plain bools to be copied and corrected; empty without any
  bool keeps_narrow_ = false;                 // the checked tensors stay narrow
  bool was_widened_on_device_ = false;
  bool pins_copies_ = false;
};

}  // namespace penstock::loader
