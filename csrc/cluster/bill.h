// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a job has cost, in units for people, from its totals and the factors that an operator gives. What is not known
// is nothing, and a sum of which a part is not known is not known either. Pure.

#include <optional>

#include "wire/reports.h"

namespace penstock::cluster {

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
  std::optional<double> energy_j{};      // of workers, where each that served knew its own
  std::optional<double> gpu_energy_j{};  // of the trainer's GPU; no part of what follows
  std::optional<double> money{};         // of workers' hours and of energy, as far as they have a price
  std::optional<double> gco2{};
};

Bill bill_of(const wire::JobCosts& costs, const CostFactors& factors, const wire::GpuMeter& gpu = {});

// The same for 1,000 samples; nothing while there is no sample.
std::optional<Bill> per_thousand_samples(const Bill& bill);

}  // namespace penstock::cluster
