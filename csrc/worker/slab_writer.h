// SPDX-License-Identifier: Apache-2.0
#pragma once
// Builds one batch in shared memory. While the batch is being made, empty() hands out tensors that lie in the slab, so
// that a collate function writes its result where the trainer will read it. seal() then copies in the tensors that lie
// elsewhere, adds boundary tensors and the record, and the batch is ready to be named to the trainer. A tensor
// that is shared stays where it is. A batch that leaves tensors out, or writes some with fewer bytes, is copied to
// another slab, so that its bytes lie together.
//
// A tensor from empty() pins its slab: if the user's code keeps it after the batch was sent, the slab is not used
// again until it is dropped, and trainer and worker see each other's writes to it, as with torch's shared tensors.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "dataset/fetch_clock.h"
#include "shm/slab_pool.h"
#include "wire/frame.h"
#include "wire/narrow.h"

namespace penstock::worker {

// The leaves that are handed over as the shared memory that they lie in (sharing.h).
struct SharedLeaves {
  std::vector<c10::Storage> storages = {};                    // each is a file of its own
  std::vector<std::optional<uint32_t>> storage_of_leaf = {};  // the storage's place, by leaf; empty: no leaf is shared
};

struct BatchContent {
  std::vector<at::Tensor> tensors;  // boundary tensors last
  std::vector<std::string> boundary_keys;
  std::span<const std::byte> nest;
  std::vector<uint32_t> withheld = {};  // leaves that are left out, ascending
  // By tensor, how it is written with fewer bytes, if it is; empty: all are written as they are.
  std::vector<std::optional<wire::NarrowForm>> forms = {};
  SharedLeaves shared = {};
};

// A batch in its slab, or, when no shared memory could be had, in buffers of its own.
struct SealedBatch {
  std::optional<shm::SlabRegion> region;
  uint64_t record_offset = 0;
  uint32_t record_bytes = 0;
  std::vector<std::byte> record;  // these two only without a region
  std::vector<std::byte> payload;
  std::vector<c10::Storage> shared = {};  // files that the trainer needs beside it, in the order of the record
};

// Whether a tensor can stand in the tensor table: dense or strided CPU memory of a plain dtype, no gradient, no lazy
// conjugate.
bool is_plain_tensor(const at::Tensor& tensor);

// The table entry of a plain tensor, its offset still zero.
wire::TensorEntry describe_tensor(const at::Tensor& tensor);

// empty(), empty_if_free() and new_bytes() are thread-safe; the rest is confined to the thread that serves requests.
class SlabWriter {
 public:
  explicit SlabWriter(shm::SlabPool& pool) : pool_(pool) {}

  // Has tensors that share bytes with each other copied where they would come to more than kWholeFactorMax times the
  // bytes that they lie in, which a pool's trainer does not take.
  void bound_sharing() { bounds_sharing_ = true; }

  // A batch begins: forgets the memory that an abandoned one had taken, and its times.
  void begin();

  // Of the batch that was begun.
  dataset::FetchClock& clock() { return clock_; }

  // A contiguous tensor in the slab of the current batch; undefined when it does not fit there or there is no memory.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

  // As empty(), and undefined too where that would wait for a slab or begin another arena.
  at::Tensor empty_if_free(at::IntArrayRef sizes, at::ScalarType dtype);

  // Whether a storage lies in the slab of the current batch.
  bool holds(const at::Storage& storage);

  // A storage of `bytes` in the slab, in a uint8 tensor; undefined as above.
  at::Tensor new_bytes(int64_t bytes) { return empty({bytes}, at::kByte); }

  // Places every tensor and the record. kClosed when the trainer is gone.
  Result<SealedBatch> seal(const BatchContent& content);

 private:
  struct Placement {
    wire::Frame frame;
    std::vector<const std::byte*> sources;
    std::vector<bool> is_in_place;
    std::vector<std::optional<wire::NarrowForm>> forms = {};
  };

  Result<SealedBatch> seal_content(const BatchContent& content) PENSTOCK_REQUIRES(mutex_);
  Result<SealedBatch> seal_in_part(const BatchContent& content) PENSTOCK_REQUIRES(mutex_);
  Result<void> take_slab() PENSTOCK_REQUIRES(mutex_);
  at::Tensor empty_in_slab(at::IntArrayRef sizes, at::ScalarType dtype) PENSTOCK_REQUIRES(mutex_);
  std::byte* allocate(uint64_t bytes) PENSTOCK_REQUIRES(mutex_);
  Placement place(const BatchContent& content) PENSTOCK_REQUIRES(mutex_);
  Result<SealedBatch> seal_elsewhere(Placement placement) PENSTOCK_REQUIRES(mutex_);
  static SealedBatch seal_inline(const Placement& placement);
  static void write_tensor(const Placement& placement, size_t index, std::byte* payload);

  shm::SlabPool& pool_;
  bool bounds_sharing_ = false;
  dataset::FetchClock clock_;
  Mutex mutex_;
  std::optional<shm::SlabRegion> region_ PENSTOCK_GUARDED_BY(mutex_);
  uint64_t used_bytes_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  bool has_no_memory_ PENSTOCK_GUARDED_BY(mutex_) = false;
};

}  // namespace penstock::worker
