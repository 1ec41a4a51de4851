// SPDX-License-Identifier: Apache-2.0
#include "session/request_order.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/result.h"

namespace penstock::session {

RequestOrder::RequestOrder(const RequestOrderOptions& options)
    : options_(options),
      send_index_(first_index()),
      received_index_(first_index()),
      is_active_(options.shard_count, true),
      task_counts_(options.shard_count, 0),
      active_count_(options.shard_count),
      next_shard_(options.first_shard_id) {
  PENSTOCK_ASSERT(options.shard_count > 0 && options.outstanding_count_max > 0);
  PENSTOCK_ASSERT(options.first_shard_id < options.shard_count, "there is no shard ", options.first_shard_id);
  PENSTOCK_ASSERT(std::ranges::adjacent_find(options_.missing, std::greater_equal<>()) == options_.missing.end() &&
                      (options_.missing.empty() || options_.missing.back() < options_.first_sequence),
                  "missing requests must ascend to numbers below the first one");
}

uint64_t RequestOrder::index_of(uint64_t sequence) const {
  if (sequence >= options_.first_sequence) return sequence;
  const auto found = std::ranges::lower_bound(options_.missing, sequence);
  if (found == options_.missing.end() || *found != sequence) return kNoIndex;
  return first_index() + static_cast<uint64_t>(found - options_.missing.begin());
}

std::optional<RequestOrder::Assignment> RequestOrder::assign() {
  PENSTOCK_ASSERT(outstanding_count_ < outstanding_count_max(), outstanding_count_, " requests are outstanding");
  for (uint32_t tried = 0; tried < options_.shard_count; ++tried) {
    const uint32_t shard_id = next_shard_;
    next_shard_ = (next_shard_ + 1) % options_.shard_count;
    if (!is_active_[shard_id]) continue;
    const uint32_t room = std::max(1u, outstanding_count_max() / active_count_);
    if (options_.overtaking_max > 0 && task_counts_[shard_id] >= room) continue;
    const uint64_t index = send_index_++;
    tasks_.emplace(index, Task{.shard_id = shard_id, .has_arrived = false});
    ++task_counts_[shard_id];
    ++outstanding_count_;
    return Assignment{.sequence = sequence_of(index), .shard_id = shard_id};
  }
  return std::nullopt;
}

RequestOrder::Next RequestOrder::next() {
  for (; received_index_ < send_index_; ++received_index_) {
    const auto task = tasks_.find(received_index_);
    if (task == tasks_.end()) continue;
    ready_sequence_ = sequence_of(received_index_);
    if (task->second.has_arrived) return Next::kReady;
    if (is_active_[task->second.shard_id]) {
      const auto overtaking = overtaking_batch();
      if (overtaking) ready_sequence_ = sequence_of(*overtaking);
      return overtaking ? Next::kReady : Next::kWait;
    }
    tasks_.erase(task);
  }
  return Next::kEnd;
}

void RequestOrder::skip_delivered() {
  while (received_index_ < send_index_ && !tasks_.contains(received_index_)) ++received_index_;
}

std::optional<uint64_t> RequestOrder::overtaking_batch() const {
  if (stored_count_ == 0 || waits_for_oldest()) return std::nullopt;
  for (const auto& [index, task] : tasks_)
    if (task.has_arrived) return index;
  return std::nullopt;
}

void RequestOrder::keep(uint64_t sequence, SharedContent content) {
  const auto task = tasks_.find(index_of(sequence));
  PENSTOCK_ASSERT(task != tasks_.end(), "request ", sequence, " was not assigned");
  task->second.content = std::move(content);
}

std::optional<RequestOrder::Awaited> RequestOrder::awaited() const {
  for (const auto& [index, task] : tasks_) {
    if (!task.has_arrived && is_active_[task.shard_id]) {
      return Awaited{.sequence = sequence_of(index), .shard_id = task.shard_id, .content = task.content};
    }
  }
  return std::nullopt;
}

uint32_t RequestOrder::undelivered_count() const {
  uint32_t count = 0;
  for (const auto& [index, task] : tasks_) count += task.has_arrived || is_active_[task.shard_id] ? 1 : 0;
  return count;
}

bool RequestOrder::is_outstanding(uint64_t sequence) const {
  const auto task = tasks_.find(index_of(sequence));
  return task != tasks_.end() && !task->second.has_arrived;
}

bool RequestOrder::arrived(uint64_t sequence) {
  const uint64_t index = index_of(sequence);
  const auto task = tasks_.find(index);
  PENSTOCK_ASSERT(task != tasks_.end() && !task->second.has_arrived, "unexpected answer to request ", sequence);
  PENSTOCK_ASSERT(outstanding_count_ > 0);
  --outstanding_count_;
  task->second.has_arrived = true;
  --task_counts_[task->second.shard_id];  // of unanswered requests
  ++stored_count_;
  return index == received_index_ || !waits_for_oldest();
}

uint32_t RequestOrder::delivered(uint64_t sequence) {
  const auto task = tasks_.find(index_of(sequence));
  PENSTOCK_ASSERT(task != tasks_.end() && task->second.has_arrived, "request ", sequence, " was not answered");
  const uint32_t shard_id = task->second.shard_id;
  --stored_count_;
  tasks_.erase(task);
  skip_delivered();
  return shard_id;
}

uint32_t RequestOrder::shard_ended(uint64_t sequence) {
  const uint64_t index = index_of(sequence);
  const auto task = tasks_.find(index);
  PENSTOCK_ASSERT(task != tasks_.end() && outstanding_count_ > 0, "unexpected end at request ", sequence);
  --outstanding_count_;
  const uint32_t shard_id = task->second.shard_id;
  if (is_active_[shard_id]) {
    is_active_[shard_id] = false;
    --active_count_;
    if (options_.frees_ended_shards) {
      for (const auto& [other, owed] : tasks_)
        if (other != index && owed.shard_id == shard_id && !owed.has_arrived) --outstanding_count_;
    }
  }
  return shard_id;
}

}  // namespace penstock::session
