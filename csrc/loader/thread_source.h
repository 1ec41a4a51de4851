// SPDX-License-Identifier: Apache-2.0
#pragma once
// Batches that threads of the trainer's process make (ThreadSource). A ThreadMaker makes the batches of one thread, in
// memory that can be recycled (RecycledMemory).

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <latch>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "loader/batch.h"
#include "loader/batch_source.h"
#include "wire/epoch_seeds.h"

namespace penstock::loader {

// Makes the batches of one thread. Confined to that thread.
class ThreadMaker {
 public:
  ThreadMaker() = default;
  ThreadMaker(const ThreadMaker&) = delete;
  ThreadMaker& operator=(const ThreadMaker&) = delete;
  virtual ~ThreadMaker() = default;

  struct Made {
    LocalTensors content{};
    std::vector<std::byte> state{};  // of the shard of an iterable dataset after the batch; empty without one
    bool is_end = false;             // there is no batch: the shard is exhausted
    bool is_compiled = false;        // compiled code made boundary tensors
    uint32_t prefix_time = 0;        // in units of wire::kTimeUnit
    wire::SampleTimes samples{};
  };
  // make() throws the dataset's exceptions; in_hand() then describes the sample that caused it, and may be empty.
  virtual std::string in_hand() const = 0;
  virtual Made make(const session::RequestContent& content, const wire::EpochSeeds& seeds) = 0;
};

struct ThreadSourceOptions {
  bool is_iterable = false;  // a shard is for one thread
  size_t arrival_count_max = 64;
};

// Batches that threads of the trainer's process make. Without threads, the trainer's thread makes each batch when it
// waits for it.
//
// Any thread makes any batch of a map-style dataset: the threads take requests from one queue. A shard of an iterable
// dataset is read by one thread in the order of its requests. Torch operators that a thread calls run on that thread
// alone, as in a worker process.
class ThreadSource : public BatchSource {
 public:
  // One maker per thread, or one for the trainer's thread if `has_threads` is false. A dataset's exception becomes an
  // error in the batch's place that names the thread.
  ThreadSource(const ThreadSourceOptions& options, std::vector<std::unique_ptr<ThreadMaker>> makers, bool has_threads);
  ~ThreadSource() override;

  Result<void> start(Stages stages) override;
  // Waits for the batches that are being made.
  void stop() override;
  void fetch(const std::shared_ptr<session::RequestContent>& content) override;
  void announce(const wire::ToJob& message) override;
  void dismiss(uint32_t) override {}
  uint32_t worker_of(uint32_t shard_id) const override { return shard_id % worker_count(); }
  uint32_t worker_count() const override { return static_cast<uint32_t>(makers_.size()); }
  bool has_bounded_memory() const override { return true; }
  void note_pace(const TrainerPace&) override {}
  void retire_held() override {}
  bool try_make_here() override;

 private:
  struct Work {
    std::shared_ptr<const session::RequestContent> content;  // shared with the order of requests
    wire::EpochSeeds seeds;
  };
  using Queue = BoundedQueue<Work>;

  Queue& queue_of(uint32_t shard_id) { return *queues_[options_.is_iterable ? shard_id % queues_.size() : 0]; }
  void run(uint32_t worker_id, std::latch& begun);
  void carry_out(uint32_t worker_id, const Work& work);
  BatchRecord::RemoteError describe_exception(uint32_t worker_id, const char* what) const;

  const ThreadSourceOptions options_;
  const bool has_threads_;
  std::vector<std::unique_ptr<ThreadMaker>> makers_;
  std::vector<std::unique_ptr<Queue>> queues_;
  wire::EpochSeeds seeds_;  // of the epoch being requested; confined to the trainer's thread
  std::vector<std::jthread> threads_;
};

// Memory for the batches that threads of this process make. A freed block is reused for a tensor of the same size:
// memory that is new to the process costs a page fault per 4 KiB, which for a large batch takes longer than the copy
// into it.
//
// Thread-safe. Tensors may outlive it, and be freed on any thread.
class RecycledMemory {
 public:
  // At most `kept_bytes_max` bytes of freed blocks are kept.
  explicit RecycledMemory(uint64_t kept_bytes_max) : blocks_(std::make_shared<Blocks>(kept_bytes_max)) {}
  ~RecycledMemory() { blocks_->close(); }
  RecycledMemory(const RecycledMemory&) = delete;
  RecycledMemory& operator=(const RecycledMemory&) = delete;

  // Returns an uninitialised contiguous tensor in a storage of exactly its bytes. Throws c10::Error if there is no
  // memory.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

  uint64_t kept_bytes() const { return blocks_->kept_bytes(); }

 private:
  class Blocks {
   public:
    explicit Blocks(uint64_t kept_bytes_max) : kept_bytes_max_(kept_bytes_max) {}

    // Returns a freed block of exactly `bytes` bytes; null if there is none.
    at::DataPtr try_take(uint64_t bytes);
    void give_back(at::DataPtr block, uint64_t bytes);
    // Frees all blocks; none are kept from now on.
    void close();
    uint64_t kept_bytes() const;

   private:
    mutable Mutex mutex_;
    uint64_t kept_bytes_max_ PENSTOCK_GUARDED_BY(mutex_);
    uint64_t kept_bytes_ PENSTOCK_GUARDED_BY(mutex_) = 0;
    std::map<uint64_t, std::vector<at::DataPtr>> free_ PENSTOCK_GUARDED_BY(mutex_);
  };
  struct Loan;

  static void end_loan(void* loan);

  std::shared_ptr<Blocks> blocks_;  // shared by the tensors
};

}  // namespace penstock::loader
