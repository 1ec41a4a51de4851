// SPDX-License-Identifier: Apache-2.0
#pragma once
// Batches that threads of the trainer's process make. Without threads, the trainer's thread makes each batch when it
// waits for it.
//
// Any thread makes any batch of a map-style dataset: the threads take requests from one queue. A shard of an iterable
// dataset is read by one thread in the order of its requests. Torch operators that a thread calls run on that thread
// alone, as in a worker process.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/bounded_queue.h"
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
  Batch::RemoteError describe_exception(uint32_t worker_id, const char* what) const;

  const ThreadSourceOptions options_;
  const bool has_threads_;
  std::vector<std::unique_ptr<ThreadMaker>> makers_;
  std::vector<std::unique_ptr<Queue>> queues_;
  wire::EpochSeeds seeds_;  // of the epoch being requested; confined to the trainer's thread
  std::vector<std::jthread> threads_;
};

}  // namespace penstock::loader
