// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a pool's engine is to run: how many workers (capacity.h), and which of them are to stop. Pure: the reports of an
// engine adapter and what the roster knows go in, orders come out. All of it follows again from the next reports when
// the controller starts anew.
//
// A worker is the engine's if the engine tells of its name. It is *present* unless it is on its way out. Workers that
// were started by hand serve as well, and the engine is asked for the rest.
//
//   stops    workers that do not run yet, then those without a trainer, then those that were given last. The roster
//            drains them, and the engine is told to stop them.
//   lost     a worker that runs according to its engine, and that the controller has not heard of for the time that a
//            start may take, is stopped and replaced.
//   orphans  a worker that has an engine's name, and that the engine does not tell of for kOrphanAllowance, is drained:
//            nobody else would end it. So it is with the processes of a node that the engine has given up.
//   silence  without an adapter the pool goes on with the workers that it has.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/instant.h"
#include "base/result.h"
#include "cluster/capacity.h"
#include "cluster/roster.h"
#include "wire/reports.h"

namespace penstock::cluster {

constexpr Duration kAdapterLease = std::chrono::seconds(3);  // then another adapter may take its place
constexpr Duration kStartAllowanceMin = std::chrono::seconds(5);
constexpr Duration kOrphanAllowance = std::chrono::seconds(30);

// Thread-compatible.
class PoolScaling {
 public:
  // kClosed with a sentence while another adapter reports. Drains workers of the roster.
  Result<wire::ScaleOrders> adapter_reported(const wire::ScaleReport& report, Roster& roster, Instant now);
  // The pool is to end. False if no adapter reports.
  bool end(Instant now);

  struct Standing {
    wire::ScaleReport report{};
    wire::ScaleOrders orders{};
    Duration since_report{};
    uint32_t running_count = 0;  // that report to the controller, too
    uint32_t starting_count = 0;
    uint32_t stopping_count = 0;
    uint64_t spent_micros = 0;
  };
  // Nothing before the first report.
  std::optional<Standing> standing(Instant now) const;

 private:
  struct Hand {
    std::string name{};
    bool is_started = false;  // according to the engine
    uint64_t worker_id = 0;   // of the roster; 0 if it does not report there
    bool is_idle = false;
    uint64_t given_order = 0;
  };
  struct Census {
    std::vector<Hand> present{};
    uint32_t stopping_count = 0;
    uint32_t by_hand_count = 0;                // workers that no engine has started
    std::map<std::string, uint64_t> untold{};  // ids of workers that stay and of which their engine does not tell
  };

  Census take_census(const Roster& roster, Instant now);
  void drain_orphans(std::map<std::string, uint64_t>& untold, Roster& roster, Instant now);
  void give_up_lost(std::vector<Hand>& present, const PoolLimits& limits, Instant now);
  void choose_stops(std::vector<Hand> present, uint32_t wanted_count, Roster& roster, Instant now);

  Capacity capacity_;
  std::optional<wire::ScaleReport> report_;
  wire::ScaleOrders orders_;
  Standing counts_;  // of it, only the counts
  Instant reported_at_{};
  bool is_to_end_ = false;
  std::set<std::string> stops_;                   // that the engine still tells of
  std::map<std::string, Instant> unheard_since_;  // workers that run and do not report
  std::map<std::string, Instant> untold_since_;   // workers that report and of which the engine does not tell
};

}  // namespace penstock::cluster
