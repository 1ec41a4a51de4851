// SPDX-License-Identifier: Apache-2.0
#pragma once
// The cost of a job in everyday units, from its totals and the factors that an operator provides. Unknown values are
// nullopt, and a sum with an unknown part is unknown, too. Pure.

#include <optional>

#include "wire/reports.h"

namespace penstock::costs {

struct CostFactors {
  std::optional<double> price_per_hour{};        // of a worker
  std::optional<double> energy_price_per_kwh{};  // in the same unit
  std::optional<double> gco2_per_kwh{};

  friend bool operator==(const CostFactors&, const CostFactors&) = default;
};

struct Bill {
  double worker_hours = 0;
  double cpu_hours = 0;
  double bytes = 0;
  double batches = 0;
  double samples = 0;
  std::optional<double> energy_j{};      // of the workers, if each that served knew its energy
  std::optional<double> gpu_energy_j{};  // of the trainer's GPU; not included in the following fields
  std::optional<double> money{};         // for worker hours and energy, as far as they have a price
  std::optional<double> gco2{};
};

Bill bill_of(const wire::JobCosts& costs, const CostFactors& factors, const wire::GpuMeter& gpu = {});

// The same per 1,000 samples; nullopt while there are no samples.
std::optional<Bill> per_thousand_samples(const Bill& bill);

}  // namespace penstock::costs
