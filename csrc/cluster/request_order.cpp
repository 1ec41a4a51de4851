// SPDX-License-Identifier: Apache-2.0
#include "cluster/request_order.h"

#include "base/assert.h"

namespace penstock::cluster {

RequestOrder::RequestOrder(const RequestOrderOptions& options)
    : options_(options),
      is_active_(options.worker_count, true),
      task_counts_(options.worker_count, 0),
      active_count_(options.worker_count) {
  PENSTOCK_ASSERT(options.worker_count > 0 && options.prefetch_factor > 0);
}

std::optional<RequestOrder::Assignment> RequestOrder::assign() {
  PENSTOCK_ASSERT(outstanding_count_ < outstanding_count_max(), outstanding_count_, " requests are outstanding");
  for (uint32_t tried = 0; tried < options_.worker_count; ++tried) {
    const uint32_t worker_id = next_worker_;
    next_worker_ = (next_worker_ + 1) % options_.worker_count;
    if (!is_active_[worker_id]) continue;
    if (!options_.in_order && task_counts_[worker_id] >= outstanding_count_max() / active_count_) continue;
    const uint64_t sequence = send_index_++;
    tasks_.emplace(sequence, Task{.worker_id = worker_id, .has_arrived = false});
    ++task_counts_[worker_id];
    ++outstanding_count_;
    return Assignment{.sequence = sequence, .worker_id = worker_id};
  }
  return std::nullopt;
}

RequestOrder::Next RequestOrder::next() {
  for (; received_index_ < send_index_; ++received_index_) {
    const auto task = tasks_.find(received_index_);
    if (task == tasks_.end()) continue;
    if (task->second.has_arrived) return Next::kReady;
    if (is_active_[task->second.worker_id]) return Next::kWait;
    tasks_.erase(task);
  }
  return Next::kEnd;
}

bool RequestOrder::arrived(uint64_t sequence) {
  const auto task = tasks_.find(sequence);
  PENSTOCK_ASSERT(task != tasks_.end() && !task->second.has_arrived, "unexpected answer to request ", sequence);
  PENSTOCK_ASSERT(outstanding_count_ > 0);
  --outstanding_count_;
  task->second.has_arrived = true;
  return sequence == received_index_ || !options_.in_order;
}

void RequestOrder::delivered(uint64_t sequence) {
  const auto task = tasks_.find(sequence);
  PENSTOCK_ASSERT(task != tasks_.end() && task->second.has_arrived, "request ", sequence, " was not answered");
  --task_counts_[task->second.worker_id];
  tasks_.erase(task);
  if (sequence == received_index_) ++received_index_;
}

void RequestOrder::worker_ended(uint32_t worker_id, uint64_t sequence) {
  PENSTOCK_ASSERT(worker_id < options_.worker_count);
  const auto task = tasks_.find(sequence);
  PENSTOCK_ASSERT(task != tasks_.end() && task->second.worker_id == worker_id && outstanding_count_ > 0);
  --outstanding_count_;
  if (is_active_[worker_id]) {
    is_active_[worker_id] = false;
    --active_count_;
  }
}

}  // namespace penstock::cluster
