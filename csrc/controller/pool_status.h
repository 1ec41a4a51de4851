// SPDX-License-Identifier: Apache-2.0
#pragma once
// The controller's answers to operators, `penstock status` and `penstock costs`, as JSON of a bounded size. Pure.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "costs/cost_ledger.h"
#include "scheduling/pool_scaling.h"
#include "scheduling/roster.h"
#include "wire/reports.h"

namespace penstock::controller {

// The last reported plan of a trainer.
struct KnownPlan {
  std::string json{};
  uint64_t change_count = 0;  // how often a plan moved other calls than the one before
};

// Refused actions of the holders of one key, for operators.
struct Offence {
  std::string text{};  // the last
  uint64_t count = 0;
  Instant at{};  // of the last
};
using Offences = std::map<std::string, Offence>;  // by key name
inline constexpr size_t kOffendersMax = 64;       // keys; beyond it, the one with the oldest offence is forgotten
inline constexpr size_t kShownOffencesMax = 8;

// The status of the controller itself, apart from its roster.
struct ControllerStanding {
  std::string endpoint{};
  Offences offences{};
  std::string key_trouble{};  // why its keys cannot be read again; empty if they can
};

// The answer to `penstock status`: workers, trainers with their queues, and the assignment of workers to trainers.
// Workers and trainers that do not fit are left out and counted.
//
// {"controller": {"id": "…", "endpoint": "tcp://…", "is_settled": true, "fenced_incarnations": 0,
//                 "policy_trouble": "…" or null,
//                 "offences": [{"by": "the user ann", "text": "…", "count": 3, "since_s": 0.5}],
//                 "key_trouble": "…" or null},
//  "workers": [{"id": "…", "incarnation": 1, "endpoint": "tcp://…", "about": "…", "machine": "…" or null,
//               "trainer": "…" or null, "assigned_to": "…" or null, "is_withdrawn": false, "is_draining": false,
//               "stuck_s": 3.5 or null, "unfit_for": ["…"], "unfit_reason": "…" or null, "since_report_s": 0.1}],
//  "trainers": [{"id": "…", "job": "…", "user": "…" or null, "group": "…" or null, "rank": 0, "world_size": 2,
//                "about": "…", "workers": 2, "workers_max": 64, "since_report_s": 0.1, "idle_s": 0.0,
//                "batches_per_s": 20.5 or null, "waited_share": 0.1 or null,
//                "workers_wanted": 12, "limited_by": "workers", "reason": "…", "changes": 3, "step_s": 0.05 or null,
//                "starved_s": 0.01 or null, "worker_s": 0.5 or null, "worker_cpu_share": 0.9 or null,
//                "batch_bytes": 602112 or null, "link_bytes_per_s": 117000000 or null, "is_paused": false,
//                "hedged_batches": 2, "plan_changes": 1,
//                "ledger": {"steps": 120, "compute_s": 3.1, "dataset_s": 0.5, "collate_s": 0.1, "prefix_s": 0.0,
//                           "worker_s": 0.2, "wire_s": 0.1, "device_s": 0.0, "order_s": 0.3, "ranks_s": 0.0,
//                           "loader_s": 0.02},
//                "queue": {"ready_batches": 1, "wanted_batches": 4, "asked_batches": 2, "bytes_in_flight": 3,
//                          "waited_s": 0.5, "delivered_batches": 4}}],
//  "workers_left_out": 0, "trainers_left_out": 0,
//  "engine": null or {"name": "slurm", "wanted": 5, "reason": "…", "running": 3, "starting": 1, "stopping": 0,
//                     "refusals": 2, "refusal": "…" or null, "trouble": "…" or null, "workers_min": 0,
//                     "workers_max": 64, "idle_s": 60.0, "price_per_hour": 0.12 or null, "budget": 5.0 or null,
//                     "spent": 1.2 or null, "is_ending": false, "since_report_s": 0.1}}
//
// "engine" starts and stops workers (scheduling/pool_scaling.h): "running" counts workers that also report to the
// controller, "refusal" is the reason why the engine last granted less than was requested, "trouble" the reason why it
// cannot be reached. "machine" is the machine whose key a worker uses; null for the role's key.
//
// "stuck_s" is how long a worker has been working on a batch that is no longer wanted, once this exceeds the usual time
// of its batches; meanwhile it is assigned to no trainer. "unfit_reason" applies to the last entry of "unfit_for".
// "idle_s" is how long a trainer has not needed workers, for example between epochs or at the end of training; 0 while
// it needs them. The rates cover the last seconds.
//
// "limited_by" is the bottleneck of the job (scheduling/scaling.h), "reason" explains the number of workers wanted.
// "step_s", "starved_s" and "worker_s" are seconds per batch: of the trainer at work, of the trainer waiting, and of
// one worker. "ledger" splits the time of the trainer's steps since it started (wire/reports.h); "hedged_batches" were
// also requested from a second worker because they were late; "plan_changes" counts how often a plan moved other calls
// than the one before.
//
// "policy_trouble" explains why workers are shared out evenly and not by the requested policy. "offences" are refused
// actions by holders of a key, who claimed another identity or registered too many processes, the last first.
// "key_trouble" explains why the key folder cannot be read again, so that keys that were removed since are still
// accepted. Ids are 16 hexadecimal digits, because JSON numbers do not hold 64 bits everywhere.
//
// Returns at most `bytes_max` bytes, which must be 16 KiB or more.
std::string status_json(const scheduling::Roster& roster, const scheduling::PoolScaling& scaling,
                        const std::map<uint64_t, KnownPlan>& plans, const ControllerStanding& standing, Instant now,
                        size_t bytes_max);

// The factors of a request for the costs. The default price per worker hour is the price of the pool's engine, if there
// is one.
costs::CostFactors factors_of(const wire::CostsRequest& request,
                              const std::optional<scheduling::PoolScaling::Standing>& engine);

// The answer to `penstock costs`: the cost of each job, in total and per 1,000 samples. Unknown values are null.
//
// {"factors": {"price_per_hour": 0.12 or null, "energy_price_per_kwh": 0.3 or null, "gco2_per_kwh": 350 or null},
//  "jobs": [{"job": "…", "about": "…", "is_running": true, "since_report_s": 0.1, "user": "…" or null,
//            "tenancies": 4, "metered_tenancies": 3, "metered_energy_j": 1200.5,
//            "total": {"worker_hours": 1.5, "cpu_hours": 1.2, "bytes": 123, "batches": 100, "samples": 6400,
//                      "energy_j": 1700.5 or null, "gpu_energy_j": 90000.5 or null, "money": 0.18 or null,
//                      "gco2": 0.17 or null},
//            "per_1000_samples": the same or null}],
//  "jobs_left_out": 0, "jobs_forgotten": 0}
//
// A tenancy is the time for which one worker served the job. It is metered if the worker knew its energy throughout.
// "energy_j" is known if all tenancies are metered, and covers the workers alone, as do money and CO2. "jobs_left_out"
// is the number of jobs that do not fit, "jobs_forgotten" the number of jobs that exceeded the ledger's limits. "user"
// is the user whose key the job's trainers use.
//
// Returns at most `bytes_max` bytes, which must be 16 KiB or more.
std::string costs_json(const costs::CostLedger& ledger, const costs::CostFactors& factors, Instant now,
                       size_t bytes_max);

}  // namespace penstock::controller
