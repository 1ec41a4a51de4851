// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a worker builds a batch in shared memory (SlabWriter), and keeps it there until the trainer has it (SlabBatch).

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
#include "server/maker.h"
#include "shm/slab_pool.h"
#include "wire/frame.h"
#include "wire/narrow.h"

namespace penstock::worker {

// The leaves that are handed over in the shared memory that contains them (batch_maker.h).
struct SharedLeaves {
  std::vector<c10::Storage> storages = {};                    // each is a separate file
  std::vector<std::optional<uint32_t>> storage_of_leaf = {};  // by leaf, index of its storage; empty: none is shared
};

struct BatchContent {
  std::vector<at::Tensor> tensors;  // boundary tensors last
  std::vector<std::string> boundary_keys;
  std::span<const std::byte> nest;
  std::vector<uint32_t> withheld = {};  // leaves left out, ascending; their tensors may be meta tensors
  // By tensor, the form with fewer bytes that it is written in, if any; empty: all are written unchanged.
  std::vector<std::optional<wire::NarrowForm>> forms = {};
  SharedLeaves shared = {};
};

// A batch in its slab or, if no shared memory was available, in separate buffers.
struct SealedBatch {
  std::optional<shm::SlabRegion> region;
  uint64_t record_offset = 0;
  uint32_t record_bytes = 0;
  std::vector<std::byte> record;  // record and payload: only without a region
  std::vector<std::byte> payload;
  std::vector<c10::Storage> shared = {};  // files that the trainer also needs, in the order of the record
};

// Whether a tensor can be an entry of the tensor table: dense or strided CPU memory of a plain dtype, no gradient, no
// lazy conjugate.
bool is_plain_tensor(const at::Tensor& tensor);

// The table entry of a plain tensor, with an offset of zero.
wire::TensorEntry describe_tensor(const at::Tensor& tensor);

// Builds one batch in shared memory. While the batch is being made, empty() returns tensors in the slab, so a collate
// function writes its result where the trainer will read it. seal() then copies in the tensors that lie elsewhere and
// adds boundary tensors and the record; after that the batch can be named to the trainer. A shared tensor stays in
// place. A batch that leaves tensors out, or writes some with fewer bytes, is copied to another slab, so that its bytes
// are contiguous.
//
// A tensor from empty() pins its slab: if the user's code keeps it after the batch was sent, the slab is not reused
// until the tensor is dropped, and trainer and worker see each other's writes to it, as with torch's shared tensors.
//
// empty(), empty_if_free() and new_bytes() are thread-safe; the rest is confined to the thread that serves requests.
class SlabWriter {
 public:
  explicit SlabWriter(shm::SlabPool& pool) : pool_(pool) {}

  // Copies tensors that share bytes with each other if their sizes would add up to more than kWholeFactorMax times the
  // bytes that contain them, which a pool's trainer rejects.
  void bound_sharing() { bounds_sharing_ = true; }

  // Starts a batch: forgets the memory taken by an abandoned batch, and its times.
  void begin();

  // Of the batch that was started last.
  dataset::FetchClock& clock() { return clock_; }

  // A contiguous tensor in the slab of the current batch; undefined if it does not fit there or no memory is available.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

  // As empty(), and also undefined if that would wait for a slab or start another arena.
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

// A batch made by this process, in the slab in which it was sealed. Thread-compatible.
class SlabBatch final : public server::HeldBatch {
 public:
  explicit SlabBatch(SealedBatch batch);
  ~SlabBatch() override;

  // Null if no shared memory was available.
  const shm::SlabRegion* region() const override { return batch_.region ? &*batch_.region : nullptr; }
  void note_handed_over() override;
  bool is_handed_over() const override { return is_handed_over_; }

 private:
  SealedBatch batch_;
  bool is_handed_over_ = false;
};

}  // namespace penstock::worker
