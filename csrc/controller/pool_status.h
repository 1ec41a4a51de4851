// SPDX-License-Identifier: Apache-2.0
#pragma once
// The answer to `penstock status`: workers, trainers with their queues, and who works for whom, as JSON of a bounded
// size. Workers and trainers that do not fit are left out and counted. Pure.
//
// {"controller": {"id": "…", "endpoint": "tcp://…", "is_settled": true, "fenced_incarnations": 0,
//                 "policy_trouble": "…" or null,
//                 "offences": [{"by": "the user ann", "text": "…", "count": 3, "since_s": 0.5}],
//                 "key_trouble": "…" or null},
//  "workers": [{"id": "…", "incarnation": 1, "endpoint": "tcp://…", "about": "…", "machine": "…" or null,
//               "trainer": "…" or null, "assigned_to": "…" or null, "is_withdrawn": false, "is_draining": false,
//               "stuck_s": 3.5 or null, "unfit_for": ["…"], "unfit_reason": "…" or null, "since_report_s": 0.1}],
//  "trainers": [{"id": "…", "job": "…", "about": "…", "workers": 2, "workers_max": 64, "since_report_s": 0.1,
//                "idle_s": 0.0, "batches_per_s": 20.5 or null, "waited_share": 0.1 or null,
//                "workers_wanted": 12, "limited_by": "workers", "reason": "…", "changes": 3, "step_s": 0.05 or null,
//                "starved_s": 0.01 or null, "worker_s": 0.5 or null, "worker_cpu_share": 0.9 or null,
//                "batch_bytes": 602112 or null, "link_bytes_per_s": 117000000 or null, "is_paused": false,
//                "hedged_batches": 2, "plan_changes": 1,
//                "ledger": {"steps": 120, "compute_s": 3.1, "dataset_s": 0.5, "collate_s": 0.1, "prefix_s": 0.0,
//                           "worker_s": 0.2, "wire_s": 0.1, "device_s": 0.0, "order_s": 0.3, "ranks_s": 0.0,
//                           "loader_s": 0.02},
//                "queue": {"ready_batches": 1, "wanted_batches": 4, "asked_batches": 2, "bytes_in_flight": 3,
//                "waited_s": 0.5,
//                          "delivered_batches": 4}}],
//  "workers_left_out": 0, "trainers_left_out": 0,
//  "engine": null or {"name": "slurm", "wanted": 5, "reason": "…", "running": 3, "starting": 1, "stopping": 0,
//                     "refusals": 2, "refusal": "…" or null, "trouble": "…" or null, "workers_min": 0,
//                     "workers_max": 64, "idle_s": 60.0, "price_per_hour": 0.12 or null, "budget": 5.0 or null,
//                     "spent": 1.2 or null, "is_ending": false, "since_report_s": 0.1}}
//
// "engine" is what starts and stops workers (cluster/scaling.h): "running" are those that report to the controller too,
// "refusal" is why the engine granted less than was asked for the last time, "trouble" why it cannot be reached.
// "machine" is whose key a worker has; null for that of the role.
// "stuck_s" is for how long a worker has been at a batch that nobody wants any more, once that is longer than its
// batches take: it goes to no trainer meanwhile. "unfit_reason" is for the last of "unfit_for". "idle_s" is for how
// long a trainer has had no use for workers, as between epochs or at the end of a program's training; 0 while it has.
// The rates are those of the last seconds.
// "limited_by" is what would have to be more or faster (cluster/scaling.h), "reason" why so many workers are wanted.
// "step_s", "starved_s" and "worker_s" are seconds of a batch: of the trainer at work, of the trainer waiting, and of
// one worker. "ledger" says where each second of the trainer's steps has gone since it began (wire/reports.h);
// "hedged_batches" were asked of a second worker since they were late;
// "plan_changes" counts how often a plan of its moved other calls than the one before. "policy_trouble" says why
// workers are shared out evenly and not by the policy that was asked for. "offences" are what holders of a key were
// refused because they claimed to be somebody else, or came in too large numbers, the last first. "key_trouble" says
// why the folder of keys cannot be read again, so that keys that were removed since are still let in. Ids are 16
// hexadecimal digits, since JSON's numbers do not hold 64 bits everywhere.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "cluster/pool_scaling.h"
#include "cluster/roster.h"

namespace penstock::controller {

// The plan of a trainer, as it has reported it last.
struct KnownPlan {
  std::string json{};
  uint64_t change_count = 0;  // how often other calls moved than before
};

// What the holders of one key did that nobody may, for operators.
struct Offence {
  std::string text{};  // the last
  uint64_t count = 0;
  Instant at{};  // of the last
};
using Offences = std::map<std::string, Offence>;  // by the name of the key
inline constexpr size_t kOffendersMax = 64;       // keys that are remembered; then the one that was longest still goes
inline constexpr size_t kShownOffencesMax = 8;

// What there is to say of the controller itself beside its roster.
struct ControllerStanding {
  std::string endpoint{};
  Offences offences{};
  std::string key_trouble{};  // why its keys cannot be read again; empty where they can
};

// Has at most `bytes_max` bytes, which must be 16 KiB or more.
std::string status_json(const cluster::Roster& roster, const cluster::PoolScaling& scaling,
                        const std::map<uint64_t, KnownPlan>& plans, const ControllerStanding& standing, Instant now,
                        size_t bytes_max);

}  // namespace penstock::controller
