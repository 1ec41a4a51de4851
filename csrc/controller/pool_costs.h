// SPDX-License-Identifier: Apache-2.0
#pragma once
// The answer to `penstock costs`: the cost of each job, in total and per 1,000 samples, as JSON of a bounded size.
// Unknown values are null. Pure.
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

#include <cstddef>
#include <optional>
#include <string>

#include "base/instant.h"
#include "costs/bill.h"
#include "costs/cost_ledger.h"
#include "scheduling/pool_scaling.h"
#include "wire/reports.h"

namespace penstock::controller {

// The factors of a request. The default price per worker hour is the price of the pool's engine, if there is one.
costs::CostFactors factors_of(const wire::CostsRequest& request,
                              const std::optional<scheduling::PoolScaling::Standing>& engine);

// Returns at most `bytes_max` bytes, which must be 16 KiB or more.
std::string costs_json(const costs::CostLedger& ledger, const costs::CostFactors& factors, Instant now,
                       size_t bytes_max);

}  // namespace penstock::controller
