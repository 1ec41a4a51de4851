// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a trainer costs: what its workers spend on it, and the energy of its GPU.

#include <cstdint>
#include <optional>
#include <string>

#include "base/board.h"
#include "base/instant.h"
#include "cluster/cost_meter.h"
#include "loader/gpu_energy.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::loader {

// Confined to the thread that loads, except where a comment says otherwise.
class JobMeter {
 public:
  // `uuid` and `library` are GpuEnergy's. The energy counts from when the library has started.
  void open_gpu(const std::string& uuid, const std::string& library = kNvmlLibrary) { gpu_.emplace(uuid, library); }
  // As GpuEnergyMeter::take: of when this was called before. Never blocks.
  wire::GpuMeter read_gpu() { return gpu_ ? gpu_->take() : wire::GpuMeter{}; }

  // Any message of a worker, the welcome too.
  void note_message(uint64_t worker_id, const wire::PoolAnswer& answer, Instant now);
  void note_batch(const wire::PoolAnswer& answer);
  // The trainer does without the worker from now on.
  void note_parting(uint64_t worker_id, Instant now);

  const wire::JobCosts& totals() const { return workers_.totals(); }
  wire::JobCosts costs() const { return board_.get(); }  // the totals; thread-safe

 private:
  cluster::CostMeter workers_;
  Board<wire::JobCosts> board_;
  std::optional<GpuEnergyMeter> gpu_;
};

}  // namespace penstock::loader
