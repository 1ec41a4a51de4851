// SPDX-License-Identifier: Apache-2.0
#include "costs/bill.h"

namespace penstock::costs {
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
