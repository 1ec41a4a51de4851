// SPDX-License-Identifier: Apache-2.0
#include "controller/pool_costs.h"

#include <optional>

#include "base/assert.h"
#include "controller/json_text.h"

namespace penstock::controller {
namespace {

constexpr size_t kCostsBytesMin = 16 << 10;
constexpr size_t kCostsFrameBytes = 512;  // the text around the list, the factors included
constexpr double kMicros = 1e6;

std::optional<double> given(const wire::CostFactor& factor) {
  return factor.is_given ? std::optional(static_cast<double>(factor.micros) / kMicros) : std::nullopt;
}

std::string bill_json(const costs::Bill& bill) {
  std::string json = "{\"worker_hours\": " + exact_number(bill.worker_hours);
  json += ", \"cpu_hours\": " + exact_number(bill.cpu_hours);
  json += ", \"bytes\": " + exact_number(bill.bytes) + ", \"batches\": " + exact_number(bill.batches);
  json += ", \"samples\": " + exact_number(bill.samples) + ", \"energy_j\": " + exact_or_null(bill.energy_j);
  json += ", \"gpu_energy_j\": " + exact_or_null(bill.gpu_energy_j);
  return json + ", \"money\": " + exact_or_null(bill.money) + ", \"gco2\": " + exact_or_null(bill.gco2) + "}";
}

std::string job_json(const costs::CostLedger::Job& job, const costs::CostFactors& factors) {
  const costs::Bill bill = costs::bill_of(job.costs, factors, job.gpu);
  const auto per_thousand = costs::per_thousand_samples(bill);
  std::string json = "{\"job\": " + json_quoted(job.name) + ", \"about\": " + json_quoted(job.about);
  json += std::string(", \"is_running\": ") + yes_or_no(job.is_running);
  json += ", \"since_report_s\": " + seconds(job.since_report);
  json += ", \"user\": " + (job.user.empty() ? "null" : json_quoted(job.user));
  json += ", \"tenancies\": " + std::to_string(job.costs.tenancy_count);
  json += ", \"metered_tenancies\": " + std::to_string(job.costs.metered_tenancy_count);
  json += ", \"metered_energy_j\": " + exact_number(static_cast<double>(job.costs.energy_uj) / kMicros);
  json += ", \"total\": " + bill_json(bill);
  return json + ", \"per_1000_samples\": " + (per_thousand ? bill_json(*per_thousand) : "null") + "}";
}

}  // namespace

costs::CostFactors factors_of(const wire::CostsRequest& request,
                              const std::optional<scheduling::PoolScaling::Standing>& engine) {
  costs::CostFactors factors{.price_per_hour = given(request.price_per_hour),
                             .energy_price_per_kwh = given(request.energy_price_per_kwh),
                             .gco2_per_kwh = given(request.gco2_per_kwh)};
  if (!factors.price_per_hour && engine && engine->report.price_micros_per_hour != 0)
    factors.price_per_hour = static_cast<double>(engine->report.price_micros_per_hour) / kMicros;
  return factors;
}

std::string costs_json(const costs::CostLedger& ledger, const costs::CostFactors& factors, Instant now,
                       size_t bytes_max) {
  PENSTOCK_ASSERT(bytes_max >= kCostsBytesMin, "bytes_max is too small for costs");
  std::string json = "{\"factors\": {\"price_per_hour\": " + exact_or_null(factors.price_per_hour);
  json += ", \"energy_price_per_kwh\": " + exact_or_null(factors.energy_price_per_kwh);
  json += ", \"gco2_per_kwh\": " + exact_or_null(factors.gco2_per_kwh) + "}";
  const auto to_json = [&](const costs::CostLedger::Job& job) { return job_json(job, factors); };
  const EntryList jobs = list_of(ledger.jobs(now), to_json, bytes_max - kCostsFrameBytes);
  json += ", \"jobs\": [" + jobs.json + "], \"jobs_left_out\": " + std::to_string(jobs.left_out_count);
  return json + ", \"jobs_forgotten\": " + std::to_string(ledger.forgotten_count()) + "}";
}

}  // namespace penstock::controller
