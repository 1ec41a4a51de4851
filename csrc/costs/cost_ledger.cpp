// SPDX-License-Identifier: Apache-2.0
#include "costs/cost_ledger.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>

#include "session/worker_session.h"

namespace penstock::costs {
namespace {

// Saturates: a report may contain any value.
uint64_t sum(uint64_t a, uint64_t b) { return a > std::numeric_limits<uint64_t>::max() - b ? ~uint64_t{0} : a + b; }

wire::JobCosts sum(const wire::JobCosts& a, const wire::JobCosts& b) {
  return {.served_ns = sum(a.served_ns, b.served_ns),
          .cpu_ns = sum(a.cpu_ns, b.cpu_ns),
          .energy_uj = sum(a.energy_uj, b.energy_uj),
          .tenancy_count = sum(a.tenancy_count, b.tenancy_count),
          .metered_tenancy_count = sum(a.metered_tenancy_count, b.metered_tenancy_count),
          .batch_count = sum(a.batch_count, b.batch_count),
          .sample_count = sum(a.sample_count, b.sample_count),
          .batch_bytes = sum(a.batch_bytes, b.batch_bytes)};
}

// Two trainers of one program share a GPU, and both of their reports contain its counter.
wire::GpuMeter joined(const std::optional<wire::GpuMeter>& a, const wire::GpuMeter& b) {
  if (!a) return b;
  if (!a->has_energy() || !b.has_energy()) return {};
  return {.begin_uj = std::min(a->begin_uj, b.begin_uj), .now_uj = std::max(a->now_uj, b.now_uj)};
}

template <typename Map>
auto earliest_reported(Map& map) {
  return std::min_element(map.begin(), map.end(),
                          [](const auto& a, const auto& b) { return a.second.reported_at < b.second.reported_at; });
}

}  // namespace

void CostLedger::reported(const wire::TrainerReport& report, Instant now, const std::string& user) {
  Key key{.user = user, .name = report.job, .about = report.about};
  if (const auto before = job_of_.find(report.trainer_id); before != job_of_.end() && before->second != key)
    left(report.trainer_id);
  if (!jobs_.contains(key) && jobs_.size() >= kLedgerJobCountMax) make_room();
  Entry& entry = jobs_[key];
  if (!entry.open.contains(report.trainer_id) && entry.open.size() >= kLedgerTrainerCountMax) {
    const auto earliest = earliest_reported(entry.open);
    job_of_.erase(earliest->first);
    close(entry, earliest);
  }
  entry.open[report.trainer_id] = {.costs = report.costs, .gpu = report.gpu, .reported_at = now};
  entry.reported_at = now;
  job_of_[report.trainer_id] = std::move(key);
}

void CostLedger::left(uint64_t trainer_id) {
  const auto known = job_of_.find(trainer_id);
  if (known == job_of_.end()) return;
  Entry& entry = jobs_.at(known->second);
  close(entry, entry.open.find(trainer_id));
  job_of_.erase(known);
}

void CostLedger::close(Entry& entry, std::map<uint64_t, Open>::iterator trainer) {
  entry.ended = sum(entry.ended, trainer->second.costs);
  entry.ended_gpu = joined(entry.ended_gpu, trainer->second.gpu);
  entry.open.erase(trainer);
}

// An active job reports its totals again, so no costs are lost by removing it. Among jobs with the same cost, the one
// whose last report is oldest is removed.
void CostLedger::make_room() {
  std::map<std::string_view, size_t> counts;
  for (const auto& [key, entry] : jobs_) ++counts[key.user];
  const auto most =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  const auto worth = [&](const auto& item) {
    uint64_t served_ns = item.second.ended.served_ns;
    for (const auto& [trainer_id, open] : item.second.open) served_ns = sum(served_ns, open.costs.served_ns);
    return std::tuple(item.first.user != most->first, served_ns, item.second.reported_at);
  };
  const auto least =
      std::min_element(jobs_.begin(), jobs_.end(), [&](const auto& a, const auto& b) { return worth(a) < worth(b); });
  for (const auto& [trainer_id, open] : least->second.open) job_of_.erase(trainer_id);
  jobs_.erase(least);
  ++forgotten_count_;
}

std::vector<CostLedger::Job> CostLedger::jobs(Instant now) const {
  std::vector<Job> result;
  for (const auto& [key, entry] : jobs_) {
    Job job{.user = key.user,
            .name = key.name,
            .about = key.about,
            .costs = entry.ended,
            .since_report = now - entry.reported_at};
    std::optional<wire::GpuMeter> gpu = entry.ended_gpu;
    for (const auto& [trainer_id, open] : entry.open) {
      job.costs = sum(job.costs, open.costs);
      gpu = joined(gpu, open.gpu);
      job.is_running = job.is_running || now - open.reported_at < session::kLease;
    }
    if (gpu) job.gpu = *gpu;
    result.push_back(std::move(job));
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const Job& a, const Job& b) { return a.since_report < b.since_report; });
  return result;
}

namespace {

constexpr double kNsPerHour = 3600e9;
constexpr double kUjPerJ = 1e6;
constexpr double kJPerKwh = 3.6e6;

using Amount = std::optional<double>;

Amount product(Amount a, Amount b) { return a && b ? Amount(*a * *b) : std::nullopt; }

// A part without a price does not count. A part with a price and an unknown quantity makes the whole unknown.
Amount money_of(double worker_hours, Amount energy_kwh, const CostFactors& factors) {
  if (!factors.price_per_hour && !factors.energy_price_per_kwh) return std::nullopt;
  const Amount of_energy =
      factors.energy_price_per_kwh ? product(factors.energy_price_per_kwh, energy_kwh) : Amount(0.0);
  if (!of_energy) return std::nullopt;
  return factors.price_per_hour.value_or(0) * worker_hours + *of_energy;
}

}  // namespace

Bill bill_of(const wire::JobCosts& costs, const CostFactors& factors, const wire::GpuMeter& gpu) {
  Bill bill{.worker_hours = static_cast<double>(costs.served_ns) / kNsPerHour,
            .cpu_hours = static_cast<double>(costs.cpu_ns) / kNsPerHour,
            .bytes = static_cast<double>(costs.batch_bytes),
            .batches = static_cast<double>(costs.batch_count),
            .samples = static_cast<double>(costs.sample_count)};
  if (costs.metered_tenancy_count >= costs.tenancy_count)
    bill.energy_j = static_cast<double>(costs.energy_uj) / kUjPerJ;
  if (gpu.has_energy()) bill.gpu_energy_j = static_cast<double>(gpu.now_uj - gpu.begin_uj) / kUjPerJ;
  const Amount energy_kwh = product(bill.energy_j, 1 / kJPerKwh);
  bill.money = money_of(bill.worker_hours, energy_kwh, factors);
  bill.gco2 = product(energy_kwh, factors.gco2_per_kwh);
  return bill;
}

std::optional<Bill> per_thousand_samples(const Bill& bill) {
  if (bill.samples <= 0) return std::nullopt;
  const double factor = 1000 / bill.samples;
  return Bill{.worker_hours = bill.worker_hours * factor,
              .cpu_hours = bill.cpu_hours * factor,
              .bytes = bill.bytes * factor,
              .batches = bill.batches * factor,
              .samples = 1000,
              .energy_j = product(bill.energy_j, factor),
              .gpu_energy_j = product(bill.gpu_energy_j, factor),
              .money = product(bill.money, factor),
              .gco2 = product(bill.gco2, factor)};
}

}  // namespace penstock::costs
