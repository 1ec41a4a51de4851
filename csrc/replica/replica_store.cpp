// SPDX-License-Identifier: Apache-2.0
#include "replica/replica_store.h"

#include <algorithm>

#include "base/live_clock.h"

namespace penstock::replica {

uint64_t ReplicaAnswer::bytes() const {
  uint64_t bytes = nest.size() + state.size() + text.size();
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

ReplicaStore::ReplicaStore(size_t follower_count, uint64_t bytes_max)
    : bytes_max_(bytes_max), followers_(follower_count) {}

// ---- For the leader

void ReplicaStore::asked(uint32_t epoch, const RequestDigest& request) {
  const MutexLock lock(mutex_);
  is_stopped_ = false;
  epoch_ = epoch;
  asked_at_ = clock_now();
  entries_.try_emplace(
      {epoch, request.sequence},
      Entry{.digest = request.value, .answer = {}, .taken_by = std::vector<bool>(followers_.size(), false)});
  changed_.notify_all();
}

void ReplicaStore::arrived(uint32_t epoch, uint64_t sequence, std::shared_ptr<const ReplicaAnswer> answer) {
  const MutexLock lock(mutex_);
  const uint64_t bytes = answer->bytes();
  while (!is_stopped_) {
    const auto slow = slow_follower(bytes);
    if (slow != awaited_) {
      awaited_ = slow;
      awaited_since_ = clock_now();
    }
    if (!slow) break;
    changed_.wait(mutex_);
  }
  awaited_.reset();
  const auto entry = entries_.find({epoch, sequence});
  if (entry == entries_.end() || entry->second.answer) return;  // all have skipped it, or it is a duplicate
  entry->second.answer = std::move(answer);
  for (size_t follower = 0; follower < followers_.size(); ++follower)
    if (!entry->second.taken_by[follower]) followers_[follower].untaken_bytes += bytes;
  changed_.notify_all();
}

void ReplicaStore::stop() {
  const MutexLock lock(mutex_);
  is_stopped_ = true;
  changed_.notify_all();
}

std::optional<std::pair<size_t, Duration>> ReplicaStore::awaited_follower() const {
  const MutexLock lock(mutex_);
  if (!awaited_) return std::nullopt;
  return std::pair(*awaited_, clock_now() - awaited_since_);
}

// A follower that waits for a missing batch is not slow: others delay it.
std::optional<size_t> ReplicaStore::slow_follower(uint64_t more_bytes) const {
  for (size_t follower = 0; follower < followers_.size(); ++follower) {
    const Follower& it = followers_[follower];
    if (!it.is_waiting && it.untaken_bytes > 0 && it.untaken_bytes + more_bytes > bytes_max_) return follower;
  }
  return std::nullopt;
}

// ---- For a follower

ReplicaStore::Taken ReplicaStore::take(size_t follower, const RequestDigest& request, Instant requested_at,
                                       Deadline deadline) {
  const MutexLock lock(mutex_);
  for (bool is_late = false;;) {
    const auto entry = find(request);
    if (entry != entries_.end()) pass_by(entry->first.first, follower);
    if (entry != entries_.end() && entry->second.answer) {
      followers_[follower].is_waiting = false;
      auto answer = entry->second.answer;
      take_from(entry, follower);
      changed_.notify_all();
      return {.answer = std::move(answer)};
    }
    if (auto refusal = refusal_of(request, requested_at, clock_now()); !refusal.empty())
      return {.refusal = std::move(refusal)};
    if (!std::exchange(followers_[follower].is_waiting, true)) changed_.notify_all();
    if (is_late) return {};
    is_late = !changed_.wait_until(mutex_, deadline);
  }
}

std::map<ReplicaStore::Key, ReplicaStore::Entry>::iterator ReplicaStore::find(const RequestDigest& request) {
  const auto fits = [&](const auto& entry) {
    return entry.first.second == request.sequence && entry.second.digest == request.value;
  };
  // Two epochs without random numbers may have identical requests: the first epoch is the next one.
  return std::find_if(entries_.begin(), entries_.end(), fits);
}

void ReplicaStore::take_from(std::map<Key, Entry>::iterator entry, size_t follower) {
  if (!entry->second.taken_by[follower]) {
    entry->second.taken_by[follower] = true;
    if (entry->second.answer) followers_[follower].untaken_bytes -= entry->second.answer->bytes();
  }
  const auto& taken_by = entry->second.taken_by;
  if (std::all_of(taken_by.begin(), taken_by.end(), [](bool is_taken) { return is_taken; })) entries_.erase(entry);
}

// A follower that requests a batch of an epoch requests no more batches of earlier epochs.
void ReplicaStore::pass_by(uint32_t epoch, size_t follower) {
  for (auto at = entries_.begin(); at != entries_.end() && at->first.first < epoch;) take_from(at++, follower);
}

std::string ReplicaStore::refusal_of(const RequestDigest& request, Instant requested_at, Instant now) const {
  const bool leader_went_on = asked_at_ > requested_at && now - requested_at > kPatience;
  if (!leader_went_on) return "";
  bool is_of_old_epoch = false;
  for (const auto& [key, entry] : entries_)
    if (key.second == request.sequence && entry.digest == request.value) {
      if (key.first == epoch_) return "";
      is_of_old_epoch = true;
    }
  if (is_of_old_epoch) return "has started another epoch and left this one before this batch was made";
  const auto other = entries_.find({epoch_, request.sequence});
  const bool is_past = other == entries_.end() && !entries_.empty() && entries_.rbegin()->first.first == epoch_ &&
                       entries_.rbegin()->first.second > request.sequence;
  if (other == entries_.end() && !is_past) return "";
  return "has requested another batch at this position, or has already sent this one to all ranks";
}

}  // namespace penstock::replica
