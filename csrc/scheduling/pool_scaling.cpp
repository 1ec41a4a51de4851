// SPDX-License-Identifier: Apache-2.0
#include "scheduling/pool_scaling.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <tuple>
#include <utility>

namespace penstock::scheduling {
namespace {

constexpr uint64_t kMsPerHour = 3'600'000;

std::string workers(uint32_t count) { return std::to_string(count) + (count == 1 ? " worker" : " workers"); }

std::string seconds_text(Duration time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f s", std::chrono::duration<double>(time).count());
  return text;
}

std::string money(uint64_t micros) {
  char text[48];
  std::snprintf(text, sizeof text, "%.2f", static_cast<double>(micros) / 1e6);
  return text;
}

}  // namespace

uint64_t spent_micros(const PoolLimits& limits, uint64_t spent_worker_ms) {
  const uint64_t hours = spent_worker_ms / kMsPerHour;
  const uint64_t rest_ms = spent_worker_ms % kMsPerHour;
  constexpr uint64_t most = std::numeric_limits<uint64_t>::max();
  const uint64_t price = limits.price_micros_per_hour;
  if (price == 0) return 0;
  if (price > most / kMsPerHour || hours >= most / price) return most;
  const uint64_t of_hours = hours * price;
  const uint64_t of_rest = rest_ms * price / kMsPerHour;
  return of_hours > most - of_rest ? most : of_hours + of_rest;
}

CapacityDecision Capacity::decide(const PoolLoad& load, const PoolLimits& limits, Instant now) {
  now_ = std::max(now_, now);
  const uint32_t present_count = load.registered_count + load.starting_count;
  // A controller that has just started keeps the workers that it finds until it knows the demand.
  if (!settled_count_) settled_count_ = std::min(present_count, limits.worker_count_max);
  note_refusals(load, present_count);
  if (limits.budget_micros) {
    const uint64_t spent = spent_micros(limits, load.spent_worker_ms);
    if (spent >= *limits.budget_micros) {
      settled_count_ = 0;
      low_since_.reset();
      return {0, "the budget of " + money(*limits.budget_micros) + " is spent (" + money(spent) +
                     " so far); restart the pool with a larger --budget to continue"};
    }
  }
  CapacityDecision aim = target(load, limits);
  if (!load.is_demand_known && aim.wanted_count < *settled_count_) {
    low_since_.reset();
    aim = {std::min(*settled_count_, limits.worker_count_max),
           "the controller has just started and keeps the current workers"};
  }
  return without_refused(settle(std::move(aim), limits), load, present_count);
}

void Capacity::forget_refusals() {
  refusal_count_.reset();
  next_retry_at_.reset();
  retry_pause_ = {};
}

CapacityDecision Capacity::target(const PoolLoad& load, const PoolLimits& limits) {
  if (load.demand_count > limits.worker_count_max)
    return {limits.worker_count_max, "jobs can use " + workers(load.demand_count) + ", and the pool may have " +
                                         std::to_string(limits.worker_count_max) + " at most"};
  if (load.demand_count < limits.worker_count_min)
    return {limits.worker_count_min, (load.demand_count == 0 ? std::string("no job asks for workers")
                                                             : "jobs can use " + workers(load.demand_count)) +
                                         ", and the pool keeps " + std::to_string(limits.worker_count_min) +
                                         " at least"};
  if (load.demand_count == 0) return {0, "no job asks for workers"};
  return {load.demand_count, "jobs can use " + workers(load.demand_count)};
}

CapacityDecision Capacity::settle(CapacityDecision target, const PoolLimits& limits) {
  const uint32_t settled = std::min(*settled_count_, limits.worker_count_max);
  if (target.wanted_count >= settled) {
    low_since_.reset();
    settled_count_ = target.wanted_count;
    return target;
  }
  if (!low_since_) {
    low_since_ = now_;
    low_most_ = target.wanted_count;
  }
  low_most_ = std::max(low_most_, target.wanted_count);
  const Duration low_for = now_ - *low_since_;
  if (low_for < limits.idle) {
    settled_count_ = settled;
    return {settled, target.reason + "; the pool releases workers after " + seconds_text(limits.idle) + ", of which " +
                         seconds_text(low_for) + " have passed"};
  }
  settled_count_ = low_most_;
  low_since_.reset();
  if (low_most_ > target.wanted_count) return settle(std::move(target), limits);
  return target;
}

void Capacity::note_refusals(const PoolLoad& load, uint32_t present_count) {
  if (load.refusal.empty()) {
    refusal_count_ = load.refusal_count;
    next_retry_at_.reset();
    retry_pause_ = {};
    return;
  }
  if (refusal_count_ && load.refusal_count == *refusal_count_) return;
  refusal_count_ = load.refusal_count;
  granted_count_ = present_count;
  retry_pause_ = retry_pause_ == Duration{} ? kRetryPauseMin : std::min(2 * retry_pause_, kRetryPauseMax);
  next_retry_at_ = now_ + retry_pause_;
}

CapacityDecision Capacity::without_refused(CapacityDecision wanted, const PoolLoad& load, uint32_t present_count) {
  if (!next_retry_at_ || wanted.wanted_count <= present_count) return wanted;
  // Workers that have left since may be replaced, but the total may not exceed the number that the engine granted.
  const uint32_t kept = std::min(wanted.wanted_count, std::max(granted_count_, present_count));
  if (now_ >= *next_retry_at_) {
    wanted.reason += "; retrying the request that the engine refused: " + load.refusal;
    return wanted;
  }
  if (kept == wanted.wanted_count) return wanted;
  return {kept, wanted.reason + "; the engine refused more than " + std::to_string(kept) + ": " + load.refusal +
                    "; retrying in " + seconds_text(*next_retry_at_ - now_)};
}

namespace {

using std::chrono::milliseconds;
using State = wire::EngineWorker::State;

// Longer times are capped to this one, which exceeds the lifetime of any pool.
constexpr uint64_t kMsMax = uint64_t{1000} * 3600 * 24 * 365;

PoolLimits limits_of(const wire::ScaleReport& report) {
  const auto duration = [](uint64_t ms) { return Duration(milliseconds(std::min(ms, kMsMax))); };
  return {.worker_count_min = std::min(report.worker_count_min, report.worker_count_max),
          .worker_count_max = report.worker_count_max,
          .idle = duration(report.idle_ms),
          .start_allowance = std::max(duration(report.start_allowance_ms), kStartAllowanceMin),
          .price_micros_per_hour = report.price_micros_per_hour,
          .budget_micros = report.has_budget ? std::optional(report.budget_micros) : std::nullopt};
}

}  // namespace

Result<wire::ScaleOrders> PoolScaling::adapter_reported(const wire::ScaleReport& report, Roster& roster, Instant now) {
  if (report_ && report_->adapter_id != report.adapter_id) {
    if (now - reported_at_ < kAdapterLease)
      return Fault{Errc::kClosed, "this pool already has an engine adapter, which runs workers with the engine " +
                                      report_->engine +
                                      "; a pool can have only one, so stop it with `penstock down` first"};
    capacity_.forget_refusals();
  }
  report_ = report;
  reported_at_ = now;
  const PoolLimits limits = limits_of(report);
  Census census = take_census(roster, now);
  if (report.trouble.empty()) drain_orphans(census.unlisted, roster, now);
  give_up_lost(census.present, limits, now);
  const auto registered = static_cast<uint32_t>(std::count_if(census.present.begin(), census.present.end(),
                                                              [](const Hand& hand) { return hand.worker_id != 0; }));
  const auto present = static_cast<uint32_t>(census.present.size());
  const uint32_t demand = roster.wanted_worker_count();
  const uint32_t foreign_count = census.by_hand_count + static_cast<uint32_t>(census.unlisted.size());
  const PoolLoad load{.demand_count = demand - std::min(demand, foreign_count),
                      .is_demand_known = roster.is_settled(now),
                      .registered_count = registered,
                      .starting_count = present - registered,
                      .draining_count = census.stopping_count,
                      .spent_worker_ms = report.spent_worker_ms,
                      .refusal_count = report.refusal_count,
                      .refusal = report.refusal};
  CapacityDecision decision = capacity_.decide(load, limits, now);
  if (is_to_end_) decision = {0, "the pool is shutting down"};
  choose_stops(std::move(census.present), decision.wanted_count, roster, now);
  counts_ = {.running_count = registered,
             .starting_count = present - registered,
             .stopping_count = static_cast<uint32_t>(report.workers.size()) - present,
             .spent_micros = spent_micros(limits, report.spent_worker_ms)};
  orders_ = {.adapter_id = report.adapter_id,
             .wanted_count = decision.wanted_count,
             .reason = std::move(decision.reason),
             .is_to_end = is_to_end_,
             .stops = {stops_.begin(), stops_.end()}};
  return orders_;
}

bool PoolScaling::end(Instant now) {
  is_to_end_ = true;
  return report_ && now - reported_at_ < kAdapterLease;
}

std::optional<PoolScaling::Standing> PoolScaling::standing(Instant now) const {
  if (!report_) return std::nullopt;
  Standing standing = counts_;
  standing.report = *report_;
  standing.orders = orders_;
  standing.since_report = now - reported_at_;
  return standing;
}

PoolScaling::Census PoolScaling::take_census(const Roster& roster, Instant now) {
  std::map<std::string, Roster::WorkerStatus> registered;
  Census census;
  for (Roster::WorkerStatus& worker : roster.workers(now)) {
    if (worker.report.name.empty()) {
      if (!worker.is_leaving) ++census.by_hand_count;
    } else {
      registered.insert_or_assign(worker.report.name, std::move(worker));
    }
  }
  std::set<std::string> told;
  for (const wire::EngineWorker& worker : report_->workers) {
    if (!told.insert(worker.name).second) continue;
    const auto found = registered.find(worker.name);
    const bool is_registered = found != registered.end();
    if (worker.state == State::kStopping || stops_.contains(worker.name) ||
        (is_registered && found->second.is_leaving)) {
      ++census.stopping_count;
      continue;
    }
    Hand hand{.name = worker.name, .is_started = worker.state == State::kRunning};
    if (is_registered) {
      const Roster::WorkerStatus& status = found->second;
      hand.worker_id = status.report.worker_id;
      hand.is_idle = status.assigned_to == 0 && status.report.trainer_id == 0;
      hand.given_order = status.assigned_order;
    }
    census.present.push_back(std::move(hand));
  }
  for (const auto& [name, worker] : registered)
    if (!told.contains(name) && !worker.is_leaving) census.unlisted.emplace(name, worker.report.worker_id);
  std::erase_if(stops_, [&](const std::string& name) { return !told.contains(name); });
  return census;
}

// Drained workers are removed from `untold`.
void PoolScaling::drain_orphans(std::map<std::string, uint64_t>& unlisted, Roster& roster, Instant now) {
  std::erase_if(unlisted_since_, [&](const auto& item) { return !unlisted.contains(item.first); });
  std::erase_if(unlisted, [&](const auto& item) {
    const Instant since = unlisted_since_.emplace(item.first, now).first->second;
    if (now - since < kOrphanAllowance) return false;
    roster.drain(item.second, now);
    return true;
  });
}

void PoolScaling::give_up_lost(std::vector<Hand>& present, const PoolLimits& limits, Instant now) {
  std::map<std::string, Instant> unheard;
  for (const Hand& hand : present) {
    if (hand.worker_id != 0 || !hand.is_started) continue;
    const auto known = unreported_since_.find(hand.name);
    unheard[hand.name] = known == unreported_since_.end() ? now : known->second;
  }
  unreported_since_ = std::move(unheard);
  std::erase_if(present, [&](const Hand& hand) {
    const auto since = unreported_since_.find(hand.name);
    if (since == unreported_since_.end() || now - since->second < limits.start_allowance) return false;
    stops_.insert(hand.name);
    return true;
  });
}

void PoolScaling::choose_stops(std::vector<Hand> present, uint32_t wanted_count, Roster& roster, Instant now) {
  if (present.size() <= wanted_count) return;
  // The engine lists workers in the order in which it started them. Among equal ones the last is stopped first.
  std::reverse(present.begin(), present.end());
  std::stable_sort(present.begin(), present.end(), [](const Hand& a, const Hand& b) {
    const auto rank = [](const Hand& hand) { return std::tuple(hand.worker_id != 0, hand.is_started, !hand.is_idle); };
    return rank(a) != rank(b) ? rank(a) < rank(b) : a.given_order > b.given_order;
  });
  present.resize(present.size() - wanted_count);
  for (const Hand& hand : present) {
    stops_.insert(hand.name);
    if (hand.worker_id != 0) roster.drain(hand.worker_id, now);
  }
}

}  // namespace penstock::scheduling
