// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many workers a pool has in total. share_out.h assigns them to trainers; this decides how many an engine has to
// run. Pure: takes the current load and the time, returns a count and a reason.
//
//   growth     immediate, to the number that the jobs can use, within the limits.
//   shrinking  only to the largest number that was useful during the whole idle time, so that a pause between two
//              epochs releases no workers.
//   refusals   workers that the engine did not grant are requested again after a pause, which doubles with each refusal
//              from kAskPauseMin to kAskPauseMax. Until then the wanted count does not exceed the current one.
//   budget     once it is spent, no workers are wanted.
//
// Invariant: the wanted count is never above the maximum that the limits allow.

#include <cstdint>
#include <optional>
#include <string>

#include "base/instant.h"

namespace penstock::scheduling {

constexpr Duration kAskPauseMin = std::chrono::seconds(1);
constexpr Duration kAskPauseMax = std::chrono::seconds(64);

struct PoolLimits {
  uint32_t worker_count_min = 0;
  uint32_t worker_count_max = 0;
  Duration idle{};                          // how long there must be too many workers before they are released
  Duration start_allowance{};               // a start that takes longer is reported
  uint64_t price_micros_per_hour = 0;       // of one worker, in millionths of the budget's unit; 0: unknown
  std::optional<uint64_t> budget_micros{};  // for the lifetime of the pool

  friend bool operator==(const PoolLimits&, const PoolLimits&) = default;
};

struct PoolLoad {
  uint32_t demand_count = 0;      // workers that the jobs can use
  bool is_demand_known = true;    // false while the controller is settling
  uint32_t registered_count = 0;  // workers that report to the controller and are not leaving
  uint32_t starting_count = 0;    // workers of the engine that do not report yet
  uint32_t draining_count = 0;    // workers that are leaving
  uint64_t spent_worker_ms = 0;   // time of all workers since the pool started
  uint64_t refusal_count = 0;     // by the engine, increasing during a run of its adapter
  std::string refusal{};          // the engine's reason for the last refusal

  friend bool operator==(const PoolLoad&, const PoolLoad&) = default;
};

struct CapacityDecision {
  uint32_t wanted_count = 0;
  std::string reason{};  // for people

  friend bool operator==(const CapacityDecision&, const CapacityDecision&) = default;
};

// The cost of this much worker time. Saturates.
uint64_t spent_micros(const PoolLimits& limits, uint64_t spent_worker_ms);

// Thread-compatible.
class Capacity {
 public:
  // A time before the previous call's counts as the previous call's.
  CapacityDecision decide(const PoolLoad& load, const PoolLimits& limits, Instant now);
  // When the engine may be asked again for the workers that it refused.
  std::optional<Instant> asks_again_at() const { return asks_again_at_; }
  // Call when another engine adapter takes over, which counts its refusals from 0.
  void forget_refusals();

 private:
  // The number of workers that the jobs can use, within the limits.
  static CapacityDecision target(const PoolLoad& load, const PoolLimits& limits);
  // Follows the target upwards immediately, and downwards after the idle time.
  CapacityDecision settle(CapacityDecision target, const PoolLimits& limits);
  void note_refusals(const PoolLoad& load, uint32_t present_count);
  CapacityDecision without_refused(CapacityDecision wanted, const PoolLoad& load, uint32_t present_count);

  Instant now_{};
  std::optional<uint32_t> settled_count_{};
  std::optional<Instant> low_since_{};  // since then the target has been below the settled count
  uint32_t low_most_ = 0;               // the largest target since
  std::optional<uint64_t> refusal_count_{};
  std::optional<Instant> asks_again_at_{};
  Duration ask_pause_{};        // before the engine is asked again
  uint32_t granted_count_ = 0;  // number of workers when the engine refused more
};

}  // namespace penstock::scheduling
