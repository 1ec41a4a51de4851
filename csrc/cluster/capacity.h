// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many workers a pool has in all. Share-out (share_out.h) says whose they are; this says how many an engine is to
// run. Pure: what is there and the time go in, a count and a sentence come out.
//
//   growth     at once, to what the jobs can use, within the limits.
//   shrinking  only to the most that was of use within the whole idle time, so that a pause between two epochs gives
//              nothing back.
//   refusals   what the engine did not grant is asked for again after a pause, which doubles with each refusal from
//              kAskPauseMin to kAskPauseMax. Until then no more is wanted than there is.
//   budget     once it is spent no worker is wanted.
//
// Invariant: the wanted count is never above the largest that the limits allow.

#include <cstdint>
#include <optional>
#include <string>

#include "base/instant.h"

namespace penstock::cluster {

constexpr Duration kAskPauseMin = std::chrono::seconds(1);
constexpr Duration kAskPauseMax = std::chrono::seconds(64);

struct PoolLimits {
  uint32_t worker_count_min = 0;
  uint32_t worker_count_max = 0;
  Duration idle{};                          // for which workers must have been too many before they are given back
  Duration start_allowance{};               // a start that takes longer is told of
  uint64_t price_micros_per_hour = 0;       // of one worker, in millionths of the unit of the budget; 0: none is known
  std::optional<uint64_t> budget_micros{};  // for the life of the pool

  friend bool operator==(const PoolLimits&, const PoolLimits&) = default;
};

struct PoolLoad {
  uint32_t demand_count = 0;      // workers that the jobs can use
  bool is_demand_known = true;    // false while the controller is settling
  uint32_t registered_count = 0;  // workers that report to the controller and stay
  uint32_t starting_count = 0;    // workers of the engine that do not report yet
  uint32_t draining_count = 0;    // workers that are on their way out
  uint64_t spent_worker_ms = 0;   // time of all workers since the pool began
  uint64_t refusal_count = 0;     // of the engine, ever rising within a run of its adapter
  std::string refusal{};          // the engine's reason for the last of them

  friend bool operator==(const PoolLoad&, const PoolLoad&) = default;
};

struct CapacityDecision {
  uint32_t wanted_count = 0;
  std::string reason{};  // a sentence for people

  friend bool operator==(const CapacityDecision&, const CapacityDecision&) = default;
};

// What so much time of workers has cost. Saturates.
uint64_t spent_micros(const PoolLimits& limits, uint64_t spent_worker_ms);

// Thread-compatible.
class Capacity {
 public:
  // A time before that of the last call counts as that.
  CapacityDecision decide(const PoolLoad& load, const PoolLimits& limits, Instant now);
  // When the engine may be asked again for what it refused.
  std::optional<Instant> asks_again_at() const { return asks_again_at_; }
  // The adapter of the engine is another one, which counts its refusals anew.
  void forget_refusals();

 private:
  // What the jobs can use, within the limits.
  static CapacityDecision target(const PoolLoad& load, const PoolLimits& limits);
  // Follows the target upwards at once, and downwards after the idle time.
  CapacityDecision settle(CapacityDecision target, const PoolLimits& limits);
  void note_refusals(const PoolLoad& load, uint32_t present_count);
  CapacityDecision without_refused(CapacityDecision wanted, const PoolLoad& load, uint32_t present_count);

  Instant now_{};
  std::optional<uint32_t> settled_count_{};
  std::optional<Instant> low_since_{};  // the target has been below the settled count
  uint32_t low_most_ = 0;               // the largest target since
  std::optional<uint64_t> refusal_count_{};
  std::optional<Instant> asks_again_at_{};
  Duration ask_pause_{};        // before the engine is asked again
  uint32_t granted_count_ = 0;  // that there were when the engine refused more
};

}  // namespace penstock::cluster
