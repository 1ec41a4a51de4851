// SPDX-License-Identifier: Apache-2.0
#include "session/dispatch.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/result.h"

namespace penstock::session {

Dispatch::Dispatch(const DispatchOptions& options) : options_(options) {
  PENSTOCK_ASSERT(options.depth_max > 0 && options.deaths_max > 0 && options.hedge_samples_min > 0);
  PENSTOCK_ASSERT(options.hedge_quantile >= 0 && options.hedge_quantile <= 1 && options.hedge_factor >= 1);
}

std::vector<Dispatch::Command> Dispatch::take_commands() { return std::exchange(commands_, {}); }

// ---- Workers

void Dispatch::add_worker(WorkerSlot slot, uint64_t credit_bytes, Instant now) {
  Worker worker;
  worker.credit_bytes = credit_bytes;
  worker.answered_at = now;
  const bool is_new = workers_.emplace(slot, std::move(worker)).second;
  PENSTOCK_ASSERT(is_new, "worker ", slot, " was added twice");
  place(now);
}

void Dispatch::lose_worker(WorkerSlot slot, Loss loss, Instant now) {
  const auto found = workers_.find(slot);
  if (found == workers_.end()) return;
  const Worker worker = std::move(found->second);
  workers_.erase(found);
  std::erase_if(lanes_, [&](const auto& lane) { return lane.second == slot; });
  for (const wire::BatchKey key : worker.outstanding) {
    Request& request = requests_.at(key);
    std::erase(request.workers, slot);
    const bool is_blamed = options_.blames_all || worker.running == key;
    if (loss == Loss::kDied && is_blamed && ++request.death_count >= options_.deaths_max) {
      fail(key);
      continue;
    }
    if (!request.workers.empty()) continue;  // another copy is in progress
    ++reissue_count_;
    waiting_.insert(key);
  }
  place(now);
}

void Dispatch::forgive(wire::BatchKey key, Instant now) {
  const auto found = requests_.find(key);
  if (found == requests_.end() || found->second.death_count == 0) return;
  if (--found->second.death_count > 0) return;
  unreserve(key);
  place(now);
}

std::optional<wire::BatchKey> Dispatch::running(WorkerSlot slot) const {
  const auto found = workers_.find(slot);
  return found == workers_.end() ? std::nullopt : found->second.running;
}

std::optional<std::pair<wire::BatchKey, uint32_t>> Dispatch::deadliest() const {
  const auto most = std::max_element(requests_.begin(), requests_.end(), [](const auto& a, const auto& b) {
    return a.second.death_count < b.second.death_count;
  });
  if (most == requests_.end() || most->second.death_count == 0) return std::nullopt;
  return std::pair(most->first, most->second.death_count);
}

void Dispatch::drain_worker(WorkerSlot slot, Instant now) {
  const auto found = workers_.find(slot);
  if (found == workers_.end() || found->second.is_draining) return;
  Worker& worker = found->second;
  worker.is_draining = true;
  const std::vector<wire::BatchKey> asked = worker.outstanding;
  for (const wire::BatchKey key : asked) {
    if (worker.running == key) continue;
    commands_.push_back({.kind = Command::Kind::kCancel, .worker = slot, .key = key});
    handed_back(slot, key, now);
  }
  if (worker.alone && !worker.asked_at.contains(*worker.alone)) worker.alone.reset();
  report_if_idle(slot);
  place(now);
}

std::span<const wire::BatchKey> Dispatch::outstanding(WorkerSlot slot) const {
  const auto found = workers_.find(slot);
  if (found == workers_.end()) return {};
  return found->second.outstanding;
}

// ---- Requests

void Dispatch::ask(wire::BatchKey key, wire::Lane lane, Instant now, SharedContent content,
                   std::optional<WorkerSlot> preferred) {
  PENSTOCK_ASSERT(!wire::is_recall(key) || lane == wire::kNoLane, "a batch of a shard cannot be re-created");
  Request request{.lane = lane, .content = std::move(content), .preferred = preferred};
  const bool is_new = requests_.emplace(key, std::move(request)).second;
  PENSTOCK_ASSERT(is_new, to_text(key), " was asked for twice");
  waiting_.insert(key);
  place(now);
}

void Dispatch::forget(wire::BatchKey key, Instant now) {
  const auto found = requests_.find(key);
  if (found == requests_.end()) return;
  cancel_copies(key, found->second);
  requests_.erase(found);
  waiting_.erase(key);
  unreserve(key);
  place(now);
}

void Dispatch::forget_other_epochs(uint32_t epoch, Instant now) {
  std::vector<wire::BatchKey> others;
  for (const auto& [key, request] : requests_)
    if (key.epoch != epoch && !wire::is_recall(key)) others.push_back(key);
  for (const wire::BatchKey key : others) forget(key, now);
}

SharedContent Dispatch::content_of(wire::BatchKey key) const {
  const auto found = requests_.find(key);
  return found == requests_.end() ? nullptr : found->second.content;
}

void Dispatch::end_lane(uint32_t epoch, wire::Lane lane, Instant now) {
  std::vector<wire::BatchKey> of_lane;
  for (auto at = requests_.lower_bound({epoch, 0}); at != requests_.end() && at->first.epoch == epoch; ++at)
    if (at->second.lane == lane) of_lane.push_back(at->first);
  for (const wire::BatchKey key : of_lane) forget(key, now);
  lanes_.erase({epoch, lane});
}

// ---- Messages from workers

bool Dispatch::was_requested(WorkerSlot slot, wire::BatchKey key) const {
  const auto found = workers_.find(slot);
  return found != workers_.end() && found->second.ever_requested.contains(key);
}

void Dispatch::started(WorkerSlot slot, wire::BatchKey key) {
  const auto found = workers_.find(slot);
  if (found == workers_.end()) return;
  found->second.running = key;
}

bool Dispatch::answered(WorkerSlot slot, wire::BatchKey key, uint64_t bytes, Instant now) {
  const auto found = workers_.find(slot);
  if (found == workers_.end()) return false;
  Worker& worker = found->second;
  if (worker.running == key) worker.running.reset();
  const bool was_requested = worker.asked_at.contains(key);
  if (was_requested) {
    const Duration time = busy_time(worker, key, now);
    worker.mean.add(time);
    times_.add(time);
  }
  worker.answered_at = now;
  take_from(slot, key);
  report_if_idle(slot);
  const auto request = requests_.find(key);
  // A request that this worker was not asked for, or no longer is, must be answered by another worker.
  const bool counts = was_requested && request != requests_.end();
  if (counts) {
    largest_bytes_ = std::max(largest_bytes_, bytes);
    cancel_copies(key, request->second, slot);
    requests_.erase(request);
    waiting_.erase(key);
  }
  place(now);
  return counts;
}

void Dispatch::handed_back(WorkerSlot slot, wire::BatchKey key, Instant now) {
  const auto found = workers_.find(slot);
  if (found == workers_.end() || !found->second.asked_at.contains(key)) return;
  Request& request = requests_.at(key);
  std::erase(request.workers, slot);
  take_from(slot, key);
  report_if_idle(slot);
  if (request.workers.empty()) {
    ++reissue_count_;
    waiting_.insert(key);
  }
  place(now);
}

// ---- Placement

void Dispatch::place(Instant now) {
  std::set<LaneId> blocked;  // an earlier request of the lane is still waiting
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const wire::BatchKey key = *at;
    Request& request = requests_.at(key);
    const LaneId lane{key.epoch, request.lane};
    const bool is_blocked = request.lane != wire::kNoLane && blocked.contains(lane);
    const auto slot = is_blocked ? std::nullopt : choose(key, request, now);
    if (!slot) {
      blocked.insert(lane);
      ++at;
      continue;
    }
    at = waiting_.erase(at);
    request_from(*slot, key, request, now);
  }
}

std::optional<WorkerSlot> Dispatch::choose(wire::BatchKey key, const Request& request, Instant now) {
  const bool is_alone = request.death_count > 0;
  // The busy worker reserved for it may hang: an idle worker answers sooner.
  if (is_alone && idle_worker()) unreserve(key);
  for (const auto& [slot, worker] : workers_)
    if (worker.alone == key) return worker.outstanding.empty() ? std::optional(slot) : std::nullopt;
  const auto owner = request.lane == wire::kNoLane ? lanes_.end() : lanes_.find({key.epoch, request.lane});
  std::map<WorkerSlot, uint32_t> lane_counts;
  if (request.lane != wire::kNoLane && owner == lanes_.end())
    for (const auto& [id, lane] : lanes_) ++lane_counts[lane];
  std::optional<WorkerSlot> best;
  std::tuple<bool, uint32_t, Duration> best_cost{};
  for (auto& [slot, worker] : workers_) {
    if (owner != lanes_.end() && owner->second != slot) continue;
    if (worker.is_draining || worker.alone) continue;
    if (!is_alone && !has_room(worker, wire::is_recall(key))) continue;
    if (!is_alone && request.preferred == slot) return slot;
    const bool is_awaited = is_alone && !worker.outstanding.empty();
    const std::tuple cost{is_awaited, lane_counts[slot], answer_time(worker, now)};
    if (!best || cost < best_cost) {
      best = slot;
      best_cost = cost;
    }
  }
  if (!best || !is_alone) return best;
  Worker& worker = workers_.at(*best);
  worker.alone = key;  // from here on it receives no other requests until this one is answered
  return worker.outstanding.empty() ? best : std::nullopt;
}

bool Dispatch::has_room(const Worker& worker, bool is_recall) const {
  if (worker.outstanding.empty()) return true;
  const auto mean = worker.mean.value();
  const bool is_quick = mean && *mean < kQuickBatch;
  const uint32_t depth_max = is_quick ? std::max(options_.depth_max, options_.quick_depth_max) : options_.depth_max;
  // One more than its depth: the trainer asks for no other batch before it has this one.
  if (is_recall) return worker.outstanding.size() <= depth_max;
  if (worker.outstanding.size() >= depth_max || largest_bytes_ == 0) return false;
  const auto count = static_cast<int64_t>(worker.outstanding.size());
  if (options_.request_ahead_below < Duration::max() && usual_time(worker) * count >= options_.request_ahead_below)
    return false;
  return worker.outstanding.size() + 1 <= worker.credit_bytes / largest_bytes_;
}

// The worker's mean; before its first answer, the median over all workers.
Duration Dispatch::usual_time(const Worker& worker) const {
  if (const auto mean = worker.mean.value()) return *mean;
  return times_.count() > 0 ? times_.quantile(0.5) : Duration(1);
}

// The time from now until it would answer one more request.
Duration Dispatch::answer_time(const Worker& worker, Instant now) const {
  const Duration mean = usual_time(worker);
  const auto count = static_cast<int64_t>(worker.outstanding.size());
  if (count == 0) return mean;
  const Duration spent = busy_time(worker, worker.outstanding.front(), now);
  return mean * (count + 1) - std::min(spent, mean);
}

void Dispatch::request_from(WorkerSlot slot, wire::BatchKey key, Request& request, Instant now) {
  Worker& worker = workers_.at(slot);
  bool is_lane_start = false;
  if (request.lane != wire::kNoLane) {
    const auto [owner, is_new] = lanes_.try_emplace({key.epoch, request.lane}, slot);
    PENSTOCK_ASSERT(owner->second == slot, "shard ", request.lane, " has another worker");
    is_lane_start = is_new;
  }
  request.is_lane_start = is_lane_start;
  worker.outstanding.push_back(key);
  worker.asked_at.emplace(key, now);
  worker.ever_requested.insert(key);
  if (worker.ever_requested.size() > kRememberedCountMax) worker.ever_requested.erase(worker.ever_requested.begin());
  request.workers.push_back(slot);
  commands_.push_back({.kind = Command::Kind::kSendRequest,
                       .worker = slot,
                       .key = key,
                       .lane = request.lane,
                       .is_lane_start = is_lane_start});
}

// The trainer no longer expects this batch from the worker.
void Dispatch::take_from(WorkerSlot slot, wire::BatchKey key) {
  Worker& worker = workers_.at(slot);
  std::erase(worker.outstanding, key);
  worker.asked_at.erase(key);
  if (worker.alone == key) worker.alone.reset();
}

void Dispatch::report_if_idle(WorkerSlot slot) {
  Worker& worker = workers_.at(slot);
  if (!worker.is_draining || worker.is_idle_reported || !worker.outstanding.empty()) return;
  worker.is_idle_reported = true;
  std::erase_if(lanes_, [&](const auto& lane) { return lane.second == slot; });
  commands_.push_back({.kind = Command::Kind::kIdle, .worker = slot});
}

void Dispatch::fail(wire::BatchKey key) {
  const auto found = requests_.find(key);
  const Request request = std::move(found->second);
  requests_.erase(found);
  waiting_.erase(key);
  unreserve(key);
  cancel_copies(key, request);
  commands_.push_back({.kind = Command::Kind::kFail,
                       .key = key,
                       .lane = request.lane,
                       .death_count = request.death_count,
                       .content = request.content});
}

// Cancels the request at all workers that still have it, except at the one that has answered it.
void Dispatch::cancel_copies(wire::BatchKey key, const Request& request, std::optional<WorkerSlot> answerer) {
  for (const WorkerSlot slot : request.workers) {
    if (slot == answerer) continue;
    commands_.push_back({.kind = Command::Kind::kCancel, .worker = slot, .key = key, .has_come = answerer.has_value()});
    take_from(slot, key);
    report_if_idle(slot);
  }
}

// Ends the reservation of a worker for this request.
void Dispatch::unreserve(wire::BatchKey key) {
  for (auto& [slot, worker] : workers_)
    if (worker.alone == key) worker.alone.reset();
}

// ---- Late requests

// How long the worker may have been working on it: since it was asked, or since its last answer.
Duration Dispatch::busy_time(const Worker& worker, wire::BatchKey key, Instant now) const {
  return now - std::max(worker.asked_at.at(key), worker.answered_at);
}

std::optional<Dispatch::LateAfter> Dispatch::late_after() const {
  if (!options_.hedges) return std::nullopt;
  const Duration longest = times_.count() > 0 ? times_.quantile(1) : Duration(0);
  const Duration far_beyond =
      std::max(options_.early_hedge_floor, std::chrono::duration_cast<Duration>(longest * options_.early_hedge_factor));
  if (times_.count() < options_.hedge_samples_min) return LateAfter{.usual = far_beyond, .deadly = far_beyond};
  const Duration usual = times_.quantile(options_.hedge_quantile);
  return LateAfter{
      .usual = std::max(options_.hedge_floor, std::chrono::duration_cast<Duration>(usual * options_.hedge_factor)),
      .deadly = far_beyond};
}

// A lane's next batch depends on state that only its worker has.
bool Dispatch::may_be_hedged(const Request& request) {
  return request.lane == wire::kNoLane && request.workers.size() == 1;
}

std::optional<WorkerSlot> Dispatch::idle_worker() const {
  for (const auto& [slot, worker] : workers_)
    if (worker.outstanding.empty() && !worker.is_draining && !worker.alone) return slot;
  return std::nullopt;
}

void Dispatch::tick(Instant now) {
  // The requests are examined only if there is a worker that could be asked.
  if (!waiting_.empty() || !idle_worker()) return;
  const auto limit = late_after();
  if (!limit) return;
  for (auto& [key, request] : requests_) {
    if (!may_be_hedged(request)) continue;
    if (busy_time(workers_.at(request.workers.front()), key, now) < limit->of(request)) continue;
    const auto idle = idle_worker();
    if (!idle) return;
    ++hedge_count_;
    if (request.death_count > 0) workers_.at(*idle).alone = key;
    request_from(*idle, key, request, now);
  }
}

std::optional<Instant> Dispatch::next_tick() const {
  if (!waiting_.empty() || !idle_worker()) return std::nullopt;
  const auto limit = late_after();
  if (!limit) return std::nullopt;
  std::optional<Instant> next;
  for (const auto& [key, request] : requests_) {
    if (!may_be_hedged(request)) continue;
    const Worker& worker = workers_.at(request.workers.front());
    next = earlier(next, std::max(worker.asked_at.at(key), worker.answered_at) + limit->of(request));
  }
  return next;
}

}  // namespace penstock::session
