// SPDX-License-Identifier: Apache-2.0
#include "cache/belady_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/result.h"

namespace penstock::cache {

void BeladyCache::foresee(std::span<const int64_t> keys) {
  for (const int64_t key : keys) {
    const uint64_t number = foreseen_reads_++;
    auto& numbers = reads_[key];
    numbers.push_back(number);
    if (numbers.size() > 1) continue;
    if (const auto kept = kept_.find(key); kept != kept_.end())
      set_rank(kept->second, {.next_read = number, .last_read = kept->second.rank.last_read, .key = key});
  }
  steps_.emplace_back(keys.begin(), keys.end());
}

size_t BeladyCache::begin(std::span<const int64_t> keys) {
  if (!steps_.empty() && !std::ranges::equal(steps_.front(), keys)) forget();
  if (steps_.empty()) foresee(keys);
  return steps_.size() - 1;
}

BeladyCache::Step BeladyCache::read(std::span<const int64_t> keys, std::span<const uint64_t> sizes) {
  PENSTOCK_ASSERT(sizes.empty() || sizes.size() == keys.size(), sizes.size(), " sizes of ", keys.size(), " keys");
  begin(keys);
  Step step{.slots_before = slots(keys), .slots_after = {}, .evicted = {}};
  std::vector<int64_t> evicted;
  for (size_t place = 0; place < keys.size(); ++place) {
    const int64_t key = keys[place];
    const auto numbers = reads_.find(key);
    PENSTOCK_ASSERT(numbers != reads_.end() && numbers->second.front() == read_count_, "key ", key);
    numbers->second.pop_front();
    if (numbers->second.empty()) reads_.erase(numbers);
    const Rank rank{.next_read = next_read_of(key), .last_read = read_count_++, .key = key};
    if (const auto kept = kept_.find(key); kept != kept_.end()) {
      ++hit_count_;
      set_rank(kept->second, rank);
    } else {
      ++miss_count_;
      admit(rank, sizes.empty() ? 1 : sizes[place], evicted);
    }
  }
  steps_.pop_front();
  ++step_count_;
  step.slots_after = slots(keys);
  std::ranges::copy_if(evicted, std::back_inserter(step.evicted), [&](int64_t key) { return !kept_.contains(key); });
  return step;
}

std::vector<int64_t> BeladyCache::slots(std::span<const int64_t> keys) const {
  std::vector<int64_t> found(keys.size(), kNoSlot);
  for (size_t place = 0; place < keys.size(); ++place)
    if (const auto kept = kept_.find(keys[place]); kept != kept_.end()) found[place] = kept->second.slot;
  return found;
}

void BeladyCache::forget() {
  steps_.clear();
  reads_.clear();
  foreseen_reads_ = read_count_;
  for (auto& [key, kept] : kept_) set_rank(kept, {.next_read = kNever, .last_read = kept.rank.last_read, .key = key});
}

uint64_t BeladyCache::next_read_of(int64_t key) const {
  const auto numbers = reads_.find(key);
  return numbers == reads_.end() ? kNever : numbers->second.front();
}

void BeladyCache::set_rank(Kept& kept, const Rank& rank) {
  order_.erase(kept.rank);
  kept.rank = rank;
  order_.insert(rank);
}

// Keeps a key if there is room, or if it is read sooner than keys that make room for it.
void BeladyCache::admit(const Rank& rank, uint64_t size, std::vector<int64_t>& evicted) {
  PENSTOCK_ASSERT(size > 0, "a key of size 0");
  if (size > capacity_) return;
  std::vector<int64_t> replaced;
  uint64_t left = capacity_ - kept_size_;
  for (auto latest = order_.begin(); left < size; ++latest) {
    if (latest == order_.end() || !(*latest < rank)) return;
    replaced.push_back(latest->key);
    left += kept_.at(latest->key).size;
  }
  for (const int64_t key : replaced) evict(key, evicted);
  int64_t slot = slot_count_;
  if (free_slots_.empty()) {
    ++slot_count_;
  } else {
    slot = free_slots_.top();
    free_slots_.pop();
  }
  order_.insert(rank);
  kept_size_ += size;
  kept_.emplace(rank.key, Kept{.rank = rank, .size = size, .slot = slot, .first_step = step_count_});
}

void BeladyCache::evict(int64_t key, std::vector<int64_t>& evicted) {
  const auto kept = kept_.find(key);
  if (kept->second.first_step < step_count_) evicted.push_back(key);
  order_.erase(kept->second.rank);
  free_slots_.push(kept->second.slot);
  kept_size_ -= kept->second.size;
  kept_.erase(kept);
}

}  // namespace penstock::cache
