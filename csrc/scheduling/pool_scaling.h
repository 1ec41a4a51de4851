// SPDX-License-Identifier: Apache-2.0
#pragma once
// The workers that a pool's engine has to run: how many (capacity.h), and which of them to stop. Pure: takes the
// reports of an engine adapter and the knowledge of the roster, returns orders. After a restart of the controller, all
// of it follows again from the next reports.
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

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/instant.h"
#include "base/result.h"
#include "scheduling/capacity.h"
#include "scheduling/roster.h"
#include "wire/reports.h"

namespace penstock::scheduling {

constexpr Duration kAdapterLease = std::chrono::seconds(3);  // after it another adapter may take over
constexpr Duration kStartAllowanceMin = std::chrono::seconds(5);
constexpr Duration kOrphanAllowance = std::chrono::seconds(30);

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
    uint32_t by_hand_count = 0;                // workers that no engine has started
    std::map<std::string, uint64_t> untold{};  // ids of remaining workers that their engine does not list
  };

  Census take_census(const Roster& roster, Instant now);
  void drain_orphans(std::map<std::string, uint64_t>& untold, Roster& roster, Instant now);
  void give_up_lost(std::vector<Hand>& present, const PoolLimits& limits, Instant now);
  void choose_stops(std::vector<Hand> present, uint32_t wanted_count, Roster& roster, Instant now);

  Capacity capacity_;
  std::optional<wire::ScaleReport> report_;
  wire::ScaleOrders orders_;
  Standing counts_;  // only the counts are set
  Instant reported_at_{};
  bool is_to_end_ = false;
  std::set<std::string> stops_;                   // names that the engine still lists
  std::map<std::string, Instant> unheard_since_;  // running workers that do not report
  std::map<std::string, Instant> untold_since_;   // reporting workers that the engine does not list
};

}  // namespace penstock::scheduling
