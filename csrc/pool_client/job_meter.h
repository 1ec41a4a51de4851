// SPDX-License-Identifier: Apache-2.0
#pragma once
// The costs of a trainer: the resources that its workers spend on it, and the energy of its GPU.

#include <cstdint>
#include <optional>
#include <string>

#include "base/board.h"
#include "base/instant.h"
#include "costs/cost_meter.h"
#include "pool_client/gpu_energy.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::pool_client {

// Confined to the loading thread, except where a comment states otherwise.
class JobMeter {
 public:
  // `uuid` and `library` are GpuEnergy's. Energy is counted from the start of the library.
  void open_gpu(const std::string& uuid, const std::string& library = kNvmlLibrary) { gpu_.emplace(uuid, library); }
  // As GpuEnergyMeter::take: the reading requested by the previous call. Never blocks.
  wire::GpuMeter read_gpu() { return gpu_ ? gpu_->take() : wire::GpuMeter{}; }

  // Call for any message of a worker, including the welcome.
  void note_message(uint64_t worker_id, const wire::PoolAnswer& answer, Instant now);
  void note_batch(const wire::PoolAnswer& answer);
  // Call when the trainer stops using the worker.
  void note_parting(uint64_t worker_id, Instant now);

  const wire::JobCosts& totals() const { return workers_.totals(); }
  wire::JobCosts costs() const { return board_.get(); }  // the totals; thread-safe

 private:
  costs::CostMeter workers_;
  Board<wire::JobCosts> board_;
  std::optional<GpuEnergyMeter> gpu_;
};

}  // namespace penstock::pool_client
