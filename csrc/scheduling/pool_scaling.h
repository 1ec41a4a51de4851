// SPDX-License-Identifier: Apache-2.0
#pragma once
// PoolScaling, the workers that a pool's engine has to run: how many, which a Capacity decides, and which of them to
// stop. Pure. share_out.h assigns a pool's workers to trainers.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "scheduling/roster.h"
#include "wire/reports.h"

namespace penstock::scheduling {

constexpr Duration kRetryPauseMin = std::chrono::seconds(1);
constexpr Duration kRetryPauseMax = std::chrono::seconds(64);

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

// How many workers a pool has in total, and thus how many an engine has to run. Takes the current load and the time,
// returns a count and a reason.
//
//   growth     immediate, to the number that the jobs can use, within the limits.
//   shrinking  only to the largest number that was useful during the whole idle time, so that a pause between two
//              epochs releases no workers.
//   refusals   workers that the engine did not grant are requested again after a pause, which doubles with each refusal
//              from kRetryPauseMin to kRetryPauseMax. Until then the wanted count does not exceed the current one.
//   budget     once it is spent, no workers are wanted.
//
// Invariant: the wanted count is never above the maximum that the limits allow.
//
// Thread-compatible.
class Capacity {
 public:
  // A time before the previous call's counts as the previous call's.
  CapacityDecision decide(const PoolLoad& load, const PoolLimits& limits, Instant now);
  // When the engine may be asked again for the workers that it refused.
  std::optional<Instant> next_retry_at() const { return next_retry_at_; }
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
  std::optional<Instant> next_retry_at_{};
  Duration retry_pause_{};      // before the engine is asked again
  uint32_t granted_count_ = 0;  // number of workers when the engine refused more
};

constexpr Duration kAdapterLease = std::chrono::seconds(3);  // after it another adapter may take over
constexpr Duration kStartAllowanceMin = std::chrono::seconds(5);
constexpr Duration kOrphanAllowance = std::chrono::seconds(30);

// Takes the reports of an engine adapter and the knowledge of the roster, returns orders. After a restart of the
// controller, its state follows again from the next reports.
//
// A worker belongs to the engine if the engine lists its name. It is *present* unless it is leaving. Manually started
// workers serve as well, and the engine is asked for the rest.
//
//   stops    workers that do not run yet, then workers without a trainer, then the most recently assigned ones. The
//            roster drains them, and the engine is asked to stop them.
//   lost     a worker that its engine reports as running, and that has not reported to the controller for the time that
//            a start may take, is stopped and replaced.
//   orphans  a worker that has an engine's name, but that the engine has not listed for kOrphanAllowance, is drained,
//            because no one else would end it. This covers the processes of a node that the engine has given up.
//   silence  without an adapter the pool continues with its current workers.
//
// Thread-compatible.
class PoolScaling {
 public:
  // Returns kClosed with a message while another adapter reports. Drains workers of the roster.
  Result<wire::ScaleOrders> adapter_reported(const wire::ScaleReport& report, Roster& roster, Instant now);
  // The pool has to end. Returns false if no adapter reports.
  bool end(Instant now);

  struct Standing {
    wire::ScaleReport report{};
    wire::ScaleOrders orders{};
    Duration since_report{};
    uint32_t running_count = 0;  // workers that report to the controller, too
    uint32_t starting_count = 0;
    uint32_t stopping_count = 0;
    uint64_t spent_micros = 0;
  };
  // Nullopt before the first report.
  std::optional<Standing> standing(Instant now) const;

 private:
  struct Hand {
    std::string name{};
    bool is_started = false;  // according to the engine
    uint64_t worker_id = 0;   // in the roster; 0 if it does not report there
    bool is_idle = false;
    uint64_t given_order = 0;
  };
  struct Census {
    std::vector<Hand> present{};
    uint32_t stopping_count = 0;
    uint32_t by_hand_count = 0;                  // workers that no engine has started
    std::map<std::string, uint64_t> unlisted{};  // ids of remaining workers that their engine does not list
  };

  Census take_census(const Roster& roster, Instant now);
  void drain_orphans(std::map<std::string, uint64_t>& unlisted, Roster& roster, Instant now);
  void give_up_lost(std::vector<Hand>& present, const PoolLimits& limits, Instant now);
  void choose_stops(std::vector<Hand> present, uint32_t wanted_count, Roster& roster, Instant now);

  Capacity capacity_;
  std::optional<wire::ScaleReport> report_;
  wire::ScaleOrders orders_;
  Standing counts_;  // only the counts are set
  Instant reported_at_{};
  bool is_to_end_ = false;
  std::set<std::string> stops_;                      // names that the engine still lists
  std::map<std::string, Instant> unreported_since_;  // running workers that do not report
  std::map<std::string, Instant> unlisted_since_;    // reporting workers that the engine does not list
};

}  // namespace penstock::scheduling
