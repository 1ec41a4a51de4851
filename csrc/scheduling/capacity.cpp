// SPDX-License-Identifier: Apache-2.0
#include "scheduling/capacity.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
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
  asks_again_at_.reset();
  ask_pause_ = {};
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
    asks_again_at_.reset();
    ask_pause_ = {};
    return;
  }
  if (refusal_count_ && load.refusal_count == *refusal_count_) return;
  refusal_count_ = load.refusal_count;
  granted_count_ = present_count;
  ask_pause_ = ask_pause_ == Duration{} ? kAskPauseMin : std::min(2 * ask_pause_, kAskPauseMax);
  asks_again_at_ = now_ + ask_pause_;
}

CapacityDecision Capacity::without_refused(CapacityDecision wanted, const PoolLoad& load, uint32_t present_count) {
  if (!asks_again_at_ || wanted.wanted_count <= present_count) return wanted;
  // Workers that have left since may be replaced, but the total may not exceed the number that the engine granted.
  const uint32_t kept = std::min(wanted.wanted_count, std::max(granted_count_, present_count));
  if (now_ >= *asks_again_at_) {
    wanted.reason += "; retrying the request that the engine refused: " + load.refusal;
    return wanted;
  }
  if (kept == wanted.wanted_count) return wanted;
  return {kept, wanted.reason + "; the engine refused more than " + std::to_string(kept) + ": " + load.refusal +
                    "; retrying in " + seconds_text(*asks_again_at_ - now_)};
}

}  // namespace penstock::scheduling
