// SPDX-License-Identifier: Apache-2.0
#include "session/named_batches.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string_view>

#include "base/result.h"

namespace penstock::session {
namespace {

// Unambiguous: each part follows its length.
std::string key_of(std::initializer_list<std::string_view> parts) {
  std::string key;
  for (const std::string_view part : parts) {
    const uint64_t size = part.size();
    char bytes[sizeof size];
    std::memcpy(bytes, &size, sizeof size);
    key.append(bytes, sizeof bytes).append(part);
  }
  return key;
}

std::string whole_key_of(const BatchName& name) { return key_of({name.group, name.samples, name.epoch, name.place}); }
std::string samples_key_of(const BatchName& name) { return key_of({name.group, name.samples}); }

}  // namespace

bool is_cheap(Duration making, uint64_t bytes) {
  const Duration copy = kCopyTime + std::chrono::nanoseconds(bytes * 1'000 / (kCopyBytesPerSecond / 1'000'000));
  return making < kWorthCopies * copy;
}

bool is_chosen(const BatchName& name) {
  // FNV-1a of 64 bits (RFC 9923), whose upper half has the better spread.
  uint64_t hash = 0xcbf29ce484222325;
  for (const std::string* part : {&name.samples, &name.epoch, &name.place})
    for (const char character : *part) hash = (hash ^ static_cast<uint8_t>(character)) * 0x100000001b3;
  return (hash >> 32) % kSparseEvery == 0;
}

NamedBatches::Found NamedBatches::ask(const BatchName& name, const Claimant& by, bool may_wait, Instant now) {
  if (budget_ == 0) return {};
  Group& group = group_of(name.group, now);
  const std::string whole_key = whole_key_of(name);
  const std::string samples_key = samples_key_of(name);
  if (const auto id = find(group, whole_key, samples_key, by)) return {.kind = Found::Kind::kKept, .id = *id};
  if (group.seeds == Seeds::kUnknown && by_samples_.contains(samples_key)) {
    const auto trial = claims_.find(group.trial);
    if (trial == claims_.end() || now - trial->second.since >= kClaimPatience) {
      group.trial = whole_key;
      return claim(whole_key, name.group, by, may_wait, now);
    }
    // Once the trial has ended, this batch may be there already.
    if (group.trial != whole_key && has_to_wait(trial->second, by, may_wait, now)) return {.kind = Found::Kind::kWait};
  }
  const bool is_sparse = this->is_sparse(group);
  if (group.is_full || (is_sparse && !is_chosen(name))) return {.is_sparse = is_sparse};
  Found found = claim(group.seeds == Seeds::kIrrelevant ? samples_key : whole_key, name.group, by, may_wait, now);
  found.is_sparse = is_sparse;
  return found;
}

std::optional<NamedBatches::Id> NamedBatches::find(Group& group, const std::string& whole_key,
                                                   const std::string& samples_key, const Claimant& by) {
  if (const auto found = by_whole_.find(whole_key); found != by_whole_.end()) {
    if (entries_.at(found->second).maker.trainer_id != by.trainer_id) {
      group.is_shared = true;
      group.is_full = false;
    }
    group.unused_bytes = 0;
    touch(group, found->second);
    return found->second;
  }
  if (group.seeds != Seeds::kIrrelevant) return std::nullopt;
  const auto found = by_samples_.find(samples_key);
  if (found == by_samples_.end()) return std::nullopt;
  group.unused_bytes = 0;
  touch(group, found->second);
  return found->second;
}

NamedBatches::Found NamedBatches::claim(const std::string& key, const std::string& group, const Claimant& by,
                                        bool may_wait, Instant now) {
  const auto [place, is_new] = claims_.try_emplace(key, Claim{.by = by, .group = group, .since = now});
  Claim& claim = place->second;
  if (is_new || claim.by == by) return {};
  if (has_to_wait(claim, by, may_wait, now)) return {.kind = Found::Kind::kWait};
  claim.by = by;
  claim.since = now;
  claim.waiting.erase(by.trainer_id);
  return {};
}

bool NamedBatches::has_to_wait(Claim& claim, const Claimant& by, bool may_wait, Instant now) {
  const auto waiting = claim.waiting.find(by.trainer_id);
  const bool is_second =
      claim.by.trainer_id == by.trainer_id || (waiting != claim.waiting.end() && waiting->second != by.worker_id);
  const Duration longest = groups_.at(claim.group).longest;
  const Duration late = longest > Duration(0) ? std::max(kLateMin, 2 * longest) : kLateFirst;
  if (now - claim.since >= (is_second ? std::min(late, kClaimPatience) : kClaimPatience)) return false;
  if (may_wait) claim.waiting[by.trainer_id] = by.worker_id;
  return true;
}

bool NamedBatches::is_passed_over(const BatchName& name) const {
  const auto group = groups_.find(name.group);
  return group != groups_.end() && is_sparse(group->second) && !is_chosen(name);
}

void NamedBatches::stop_waiting(uint64_t worker_id) {
  for (auto& [key, claim] : claims_)
    std::erase_if(claim.waiting, [&](const auto& waiting) { return waiting.second == worker_id; });
}

bool NamedBatches::is_awaited(const std::string& group) const {
  return std::any_of(claims_.begin(), claims_.end(),
                     [&](const auto& item) { return item.second.group == group && !item.second.waiting.empty(); });
}

std::optional<NamedBatches::Id> NamedBatches::twin_of(const BatchName& name) const {
  const auto group = groups_.find(name.group);
  if (group == groups_.end() || group->second.seeds != Seeds::kUnknown) return std::nullopt;
  if (group->second.trial.empty() || group->second.trial != whole_key_of(name)) return std::nullopt;
  const auto found = by_samples_.find(samples_key_of(name));
  if (found == by_samples_.end() || entries_.at(found->second).epoch == name.epoch) return std::nullopt;
  return found->second;
}

void NamedBatches::note_comparison(const BatchName& name, Comparison comparison) {
  const auto found = groups_.find(name.group);
  if (found == groups_.end()) return;
  found->second.trial.clear();
  if (comparison == Comparison::kEqual) found->second.seeds = Seeds::kIrrelevant;
  if (comparison == Comparison::kDifferent) found->second.seeds = Seeds::kRelevant;
}

NamedBatches::Admission NamedBatches::admit(const BatchName& name, const Claimant& by, const MadeBatch& batch,
                                            Instant now) {
  Admission admission;
  std::string whole_key = whole_key_of(name);
  std::string samples_key = samples_key_of(name);
  Group& group = group_of(name.group, now);
  for (const std::string* key : {&whole_key, &samples_key}) {
    const auto claim = claims_.find(*key);
    if (claim != claims_.end() && claim->second.by == by)
      group.longest = std::max(group.longest, now - claim->second.since);
  }
  const bool is_there = by_whole_.contains(whole_key) ||
                        (group.seeds == Seeds::kIrrelevant && batch.draws_nothing && by_samples_.contains(samples_key));
  const uint64_t with_names =
      batch.bytes + kNameBytes + 2 * (whole_key.size() + samples_key.size() + name.group.size() + name.epoch.size());
  group.is_cheap = batch.is_cheap;
  const bool is_passed_over = is_sparse(group) && !is_chosen(name);
  if (!is_there && !is_passed_over) group.is_full = !make_room(name, with_names, now, admission.evicted);
  if (is_there || is_passed_over || group.is_full) {
    release(name, by);
    return admission;
  }
  const Id id = ++last_id_;
  group.bytes += with_names;
  group.unused_bytes += with_names;
  ++group.entry_count;
  bytes_ += with_names;
  bytes_by_worker_[by.worker_id] += with_names;
  entries_.emplace(id, Entry{.group = name.group,
                             .epoch = name.epoch,
                             .whole_key = std::move(whole_key),
                             .samples_key = std::move(samples_key),
                             .maker = by,
                             .bytes = with_names,
                             .draws_nothing = batch.draws_nothing});
  admission.id = id;
  return admission;
}

bool NamedBatches::settle(Id id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return false;
  Entry& entry = found->second;
  end_claim(entry.whole_key, entry.maker);
  end_claim(entry.samples_key, entry.maker);
  if (by_whole_.contains(entry.whole_key)) {
    erase(id);
    return false;
  }
  entry.is_settled = true;
  by_whole_.emplace(entry.whole_key, id);
  if (entry.draws_nothing) by_samples_.try_emplace(entry.samples_key, id);
  touch(groups_.at(entry.group), id);
  return true;
}

void NamedBatches::drop(Id id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  const Entry entry = found->second;
  erase(id);
  end_claim(entry.whole_key, entry.maker);
  end_claim(entry.samples_key, entry.maker);
}

void NamedBatches::release(const BatchName& name, const Claimant& by) {
  end_claim(whole_key_of(name), by);
  end_claim(samples_key_of(name), by);
  forget_if_empty(name.group);
}

void NamedBatches::refuse(const BatchName& name, const Claimant& by, Instant now) {
  group_of(name.group, now).is_full = true;
  release(name, by);
}

std::vector<NamedBatches::Id> NamedBatches::leave(uint64_t worker_id) {
  stop_waiting(worker_id);
  std::vector<Id> unsettled;
  for (const auto& [id, entry] : entries_)
    if (entry.maker.worker_id == worker_id && !entry.is_settled) unsettled.push_back(id);
  for (const Id id : unsettled) erase(id);
  std::vector<std::string> groups;
  for (const auto& [key, claim] : claims_)
    if (claim.by.worker_id == worker_id) groups.push_back(claim.group);
  std::erase_if(claims_, [&](const auto& item) { return item.second.by.worker_id == worker_id; });
  for (const std::string& group : groups) forget_if_empty(group);
  return unsettled;
}

std::vector<NamedBatches::Id> NamedBatches::set_budget(uint64_t bytes, Instant now) {
  budget_ = bytes;
  std::vector<Id> evicted;
  while (bytes_ > budget_) {
    const auto victim = find_victim({}, 0, now);
    if (victim == groups_.end()) break;  // only entries that are not settled
    const Id id = victim->second.by_use.begin()->second;
    const std::string group = victim->first;
    evicted.push_back(id);
    erase(id);
    forget_if_empty(group);
  }
  return evicted;
}

uint64_t NamedBatches::bytes_made_by(uint64_t worker_id) const {
  const auto found = bytes_by_worker_.find(worker_id);
  return found == bytes_by_worker_.end() ? 0 : found->second;
}

void NamedBatches::end_claim(const std::string& key, const Claimant& by) {
  const auto found = claims_.find(key);
  if (found == claims_.end() || found->second.by != by) return;
  const auto group = groups_.find(found->second.group);
  if (group != groups_.end() && group->second.trial == key) group->second.trial.clear();
  claims_.erase(found);
}

void NamedBatches::touch(Group& group, Id id) {
  Entry& entry = entries_.at(id);
  group.by_use.erase(entry.use);
  entry.use = ++use_count_;
  group.by_use.emplace(entry.use, id);
}

// The group to evict from, with the bytes of the new batch counted as part of its group. end() if no group has a
// settled entry; the own group is returned even if it has none.
NamedBatches::Groups::iterator NamedBatches::find_victim(const std::string& own, uint64_t own_bytes, Instant now) {
  auto victim = groups_.end();
  const auto bytes_of = [&](const auto& group) {
    return group->second.bytes + (group->first == own ? own_bytes : uint64_t{0});
  };
  const auto is_idle = [&](const auto& group) { return now - group->second.used_at >= kGroupIdle; };
  for (auto group = groups_.begin(); group != groups_.end(); ++group) {
    if (group->second.by_use.empty() && group->first != own) continue;
    const bool is_worse =
        victim == groups_.end() || (is_idle(group) && is_idle(victim)   ? group->second.used_at < victim->second.used_at
                                    : is_idle(group) != is_idle(victim) ? is_idle(group)
                                                                        : bytes_of(group) > bytes_of(victim));
    if (is_worse) victim = group;
  }
  return victim;
}

bool NamedBatches::make_room(const BatchName& name, uint64_t bytes, Instant now, std::vector<Id>& evicted) {
  if (bytes > budget_) return false;
  while (bytes_ + bytes > budget_) {
    const auto victim = find_victim(name.group, bytes, now);
    if (victim == groups_.end() || victim->second.by_use.empty()) return false;
    const Id id = victim->second.by_use.begin()->second;
    if (victim->first == name.group) {
      const Group& own = victim->second;
      const bool is_of_this_epoch = entries_.at(id).epoch == name.epoch;
      if (own.seeds == Seeds::kIrrelevant || (is_of_this_epoch && !own.is_shared)) return false;
    }
    const std::string group = victim->first;
    evicted.push_back(id);
    erase(id);
    if (group != name.group) forget_if_empty(group);
  }
  return true;
}

void NamedBatches::erase(Id id) {
  const auto found = entries_.find(id);
  PENSTOCK_ASSERT(found != entries_.end(), "an entry was erased twice");
  const Entry& entry = found->second;
  Group& group = groups_.at(entry.group);
  group.bytes -= entry.bytes;
  --group.entry_count;
  bytes_ -= entry.bytes;
  const auto made = bytes_by_worker_.find(entry.maker.worker_id);
  if ((made->second -= entry.bytes) == 0) bytes_by_worker_.erase(made);
  if (entry.is_settled) {
    group.by_use.erase(entry.use);
    if (const auto whole = by_whole_.find(entry.whole_key); whole != by_whole_.end() && whole->second == id)
      by_whole_.erase(whole);
    if (const auto samples = by_samples_.find(entry.samples_key); samples != by_samples_.end() && samples->second == id)
      by_samples_.erase(samples);
  }
  entries_.erase(found);
}

NamedBatches::Group& NamedBatches::group_of(const std::string& name, Instant now) {
  if (!groups_.contains(name)) {
    std::erase_if(groups_, [&](const auto& item) {
      return item.second.entry_count == 0 && now - item.second.used_at >= kGroupIdle;
    });
  }
  Group& group = groups_[name];
  group.used_at = now;
  return group;
}

// A group that has lost its last batch loses what was known about it, except that its batches found no room.
void NamedBatches::forget_if_empty(const std::string& name) {
  const auto group = groups_.find(name);
  if (group == groups_.end() || group->second.entry_count > 0 || group->second.is_full) return;
  const bool is_claimed =
      std::any_of(claims_.begin(), claims_.end(), [&](const auto& item) { return item.second.group == name; });
  if (!is_claimed) groups_.erase(group);
}

}  // namespace penstock::session
