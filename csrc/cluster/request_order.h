// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which worker makes which batch, and which batch the trainer may have next, with local workers: torch's order to the
// letter. Batch k goes to the next worker in turn that still has data; batches come out by sequence, or as they arrive
// when the order is free. A pure state machine: it reads no clock and owns no socket.
//
// Invariant: outstanding_count() == tasks that were assigned and neither arrived nor were given up.

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace penstock::cluster {

struct RequestOrderOptions {
  uint32_t worker_count = 1;
  uint32_t prefetch_factor = 2;
  bool in_order = true;
};

// Thread-compatible.
class RequestOrder {
 public:
  explicit RequestOrder(const RequestOrderOptions& options);

  struct Assignment {
    uint64_t sequence;
    uint32_t worker_id;
  };
  // The worker of the next request, or nothing when no worker has data left (the request is then dropped, as torch
  // does).
  std::optional<Assignment> assign();

  enum class Next : uint8_t {
    kReady,  // ready_sequence() has arrived and is next
    kWait,   // an answer is needed first
    kEnd,    // nothing more will come
  };
  // What the trainer does now. Steps over requests that their worker will never answer.
  Next next();
  uint64_t ready_sequence() const { return received_index_; }

  // An answer came. True when it is the trainer's next batch (in whatever order is wanted) and is not to be kept.
  bool arrived(uint64_t sequence);

  // The batch was given to the trainer: its worker has room again.
  void delivered(uint64_t sequence);

  // The worker's share of an iterable dataset is exhausted; `sequence` is the request it answered so.
  void worker_ended(uint32_t worker_id, uint64_t sequence);

  bool is_active(uint32_t worker_id) const { return is_active_[worker_id]; }
  uint32_t outstanding_count() const { return outstanding_count_; }
  uint32_t outstanding_count_max() const { return options_.prefetch_factor * options_.worker_count; }

 private:
  struct Task {
    uint32_t worker_id;
    bool has_arrived;
  };

  RequestOrderOptions options_;
  uint64_t send_index_ = 0;
  uint64_t received_index_ = 0;
  std::map<uint64_t, Task> tasks_;
  std::vector<bool> is_active_;
  std::vector<uint32_t> task_counts_;
  uint32_t active_count_;
  uint32_t next_worker_ = 0;
  uint32_t outstanding_count_ = 0;
};

}  // namespace penstock::cluster
