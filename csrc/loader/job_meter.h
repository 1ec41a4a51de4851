// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a trainer costs: what its workers spend on it, and the energy of its GPU.

#include <cstdint>
#include <future>
#include <memory>
#include <string>

#include "base/board.h"
#include "base/instant.h"
#include "base/result.h"
#include "cluster/cost_meter.h"
#include "loader/gpu_energy.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::loader {

// Confined to the thread that loads, except where a comment says otherwise.
class JobMeter {
 public:
  // `uuid` and `library` are GpuEnergy's. A thread of its own starts the library, so that no batch waits for it; the
  // energy counts from when it has started.
  void open_gpu(const std::string& uuid, const std::string& library = kNvmlLibrary);
  // Unknown before the library has started, and from the first time that it could not be read.
  wire::GpuMeter read_gpu();

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
  std::future<Result<std::unique_ptr<GpuEnergy>>> opening_;
  std::unique_ptr<GpuEnergy> gpu_;  // null where its energy is not known
  wire::GpuMeter gpu_meter_;
};

}  // namespace penstock::loader
