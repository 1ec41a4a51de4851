// SPDX-License-Identifier: Apache-2.0
#pragma once
// A BatchOrigin holds the data about a batch that an offloaded module needs: its tensors as they arrived, the boundary
// tensors that workers computed from them, and the set of tensors that the program reads. Tensors that stayed with a
// pool worker are fetched on first read, so access to the parts of a Batch (penstock/batch.h) is implemented here, too.

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "loader/batch.h"
#include "penstock/batch.h"

namespace penstock {

namespace api {

class WorkerSet;

// The set of a batch's leaves that the program has read. Thread-safe.
class ReadLeaves {
 public:
  void note(uint32_t leaf) {
    MutexLock lock(mutex_);
    leaves_.insert(leaf);
  }
  std::set<uint32_t> seen() const {
    MutexLock lock(mutex_);
    return leaves_;
  }

 private:
  mutable Mutex mutex_;
  std::set<uint32_t> leaves_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace api

// The origin of one batch; shared by its copies, which any thread may read. Only the thread that the batch was
// delivered to can fetch leaves that stayed with a worker.
class BatchOrigin {
 public:
  // A tensor of the batch. Its version shows writes to it, and its address shows new memory.
  struct Leaf {
    at::Tensor tensor;
    const void* address = nullptr;
    uint32_t version = 0;

    explicit Leaf(at::Tensor of)
        : tensor(std::move(of)),
          address(tensor.const_data_ptr()),
          version(tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version()) {}
    bool is_unchanged() const {
      return !tensor.is_inference() && tensor.const_data_ptr() == address &&
             tensor.unsafeGetTensorImpl()->version_counter().current_version() == version;
    }
  };
  // Leaves that stayed with the worker that made the batch.
  struct Withheld {
    std::set<uint32_t> leaves;
    loader::BatchRecord::Origin maker;
    std::weak_ptr<api::WorkerSet> workers;
    int64_t batch_number = 0;
    Value came;  // the batch's value, with placeholder tensors without own memory for the withheld leaves
  };

  // `leaves` are the batch's tensors in the order of the workers' leaf numbers, and `boundary` the tensors of `keys`.
  BatchOrigin(const std::vector<at::Tensor>& leaves, std::vector<std::string> keys,
              const std::vector<at::Tensor>& boundary, std::optional<Withheld> withheld);

  // Indexed by the workers' leaf numbers. The leaves in missing() are placeholders.
  const std::vector<Leaf>& leaves() const { return has_come_.load() ? whole_leaves_ : leaves_; }
  std::vector<at::Tensor> tensors() const;
  // The leaf number of a tensor in the current leaves(); none for other tensors.
  std::optional<uint32_t> leaf_of(const at::Tensor& tensor) const;
  // The boundary tensor of a key; undefined if there is none.
  at::Tensor find(const std::string& key) const;

  // Leaves that are still with the worker.
  const std::set<uint32_t>& missing() const;
  // Records that the program reads a tensor of the batch, and returns the leaf that this tensor stands for.
  const at::Tensor& read(const at::Tensor& came);
  // The same for the whole batch, which arrived with the value `came`.
  const Value& read_all(const Value& came);
  // The current value of the batch, for internal use: does not count as a read.
  const Value& now(const Value& came) const { return has_come_.load() ? whole_ : came; }
  // Fetches all missing leaves; only those in `read` count as read. Blocks. Throws Error kUnsupported in another thread
  // or process than the batch was delivered to, kClosed if the loader or its workers are gone, and kDataset if the
  // batch had to be made again, and this failed or gave a different batch.
  void complete(const std::set<uint32_t>& read);
  // The same with workers that are about to shut down.
  void complete(api::WorkerSet& workers);

  // Whether this is the thread that the batch was delivered to.
  bool is_owner() const;
  const std::shared_ptr<api::ReadLeaves>& reads() const { return reads_; }

 private:
  void check_same(loader::Batch& made, const std::vector<at::Tensor>& tensors) const;
  std::string name() const { return "batch " + std::to_string(withheld_->batch_number); }

  const std::vector<Leaf> leaves_;
  const std::vector<std::string> keys_;
  const std::vector<Leaf> boundary_;
  const std::optional<Withheld> withheld_;
  // Written once, by the owner, before has_come_ is set.
  std::vector<Leaf> whole_leaves_;
  Value whole_;
  std::atomic<bool> has_come_{false};
  const std::shared_ptr<api::ReadLeaves> reads_ = std::make_shared<api::ReadLeaves>();  // may outlive the batch
  const std::thread::id owner_ = std::this_thread::get_id();
  const pid_t owner_pid_;
};

// The library's access to the internals of a Batch.
struct BatchAccess {
  static void set_mark(Batch& batch, std::shared_ptr<const api::CommitMark> mark) { batch.mark_ = std::move(mark); }
  static const api::CommitMark* mark_of(const Batch& batch) { return batch.mark_.get(); }
  static void set_origin(Batch& batch, std::shared_ptr<BatchOrigin> origin) { batch.origin_ = std::move(origin); }
  // Null for a batch delivered before any module was offloaded to its loader.
  static BatchOrigin* origin_of(const Batch& batch) { return batch.origin_.get(); }
  // Does not count as a read.
  static const Value& value_of(const Batch& batch) {
    return batch.origin_ ? batch.origin_->now(batch.value_) : batch.value_;
  }
};

}  // namespace penstock
