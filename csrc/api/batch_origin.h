// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an offloaded module has to know of a batch: its tensors as they came, what workers have computed of them, and
// which of them the program reads. Tensors that stayed with a pool's worker come when they are read.

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

// Which leaves of a batch the program has read. Thread-safe.
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

// Of one batch; shared by its copies, which any thread may read. Only the thread that the batch was given to has leaves
// come that stayed with a worker.
class BatchOrigin {
 public:
  // A tensor of the batch. A write to it is seen by its version, and new memory by its address.
  struct Leaf {
    at::Tensor tensor;
    const void* address = nullptr;
    uint32_t version = 0;

    explicit Leaf(at::Tensor of)
        : tensor(std::move(of)),
          address(tensor.const_data_ptr()),
          version(tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version()) {}
    bool is_as_it_came() const {
      return !tensor.is_inference() && tensor.const_data_ptr() == address &&
             tensor.unsafeGetTensorImpl()->version_counter().current_version() == version;
    }
  };
  // Leaves that stayed with the worker that made the batch.
  struct Withheld {
    std::set<uint32_t> leaves;
    loader::Batch::Origin maker;
    std::weak_ptr<api::WorkerSet> workers;
    int64_t batch_number = 0;
    Value came;  // the batch's value, with tensors without memory of their own in the places of the leaves
  };

  // `leaves` are the batch's tensors by the numbers that workers know them by, and `boundary` those of `keys`.
  BatchOrigin(const std::vector<at::Tensor>& leaves, std::vector<std::string> keys,
              const std::vector<at::Tensor>& boundary, std::optional<Withheld> withheld);

  // By the numbers that workers know them by. In the places of missing() they have no memory of their own.
  const std::vector<Leaf>& leaves() const { return has_come_.load() ? whole_leaves_ : leaves_; }
  std::vector<at::Tensor> tensors() const;
  // The number of a tensor as it is in leaves() now; none for one from elsewhere.
  std::optional<uint32_t> leaf_of(const at::Tensor& tensor) const;
  // The boundary tensor of a key; undefined if there is none.
  at::Tensor find(const std::string& key) const;

  // Leaves that are with the worker still.
  const std::set<uint32_t>& missing() const;
  // A tensor of the batch as it came, for the program, which reads it: the leaf that it stands for.
  const at::Tensor& read(const at::Tensor& came);
  // The same of the whole batch, whose value was `came`.
  const Value& read_all(const Value& came);
  // The value of the batch as it is now, for the library, which reads none of it yet.
  const Value& now(const Value& came) const { return has_come_.load() ? whole_ : came; }
  // Has all leaves come, of which `read` are read and the others not. Blocks. Throws Error kUnsupported in another
  // thread or process than the batch was given to, kClosed where the loader or its workers are gone, kDataset where the
  // batch had to be made again and could not be, or is another one.
  void complete(const std::set<uint32_t>& read);
  // The same with workers that are about to go.
  void complete(api::WorkerSet& workers);

  // Whether this is the thread that the batch was given to.
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

// The way of this library into a Batch.
struct BatchAccess {
  static void set_origin(Batch& batch, std::shared_ptr<BatchOrigin> origin) { batch.origin_ = std::move(origin); }
  // Null for a batch that came before anything was offloaded to its loader.
  static BatchOrigin* origin_of(const Batch& batch) { return batch.origin_.get(); }
  // Without a read of it.
  static const Value& value_of(const Batch& batch) {
    return batch.origin_ ? batch.origin_->now(batch.value_) : batch.value_;
  }
};

}  // namespace penstock
