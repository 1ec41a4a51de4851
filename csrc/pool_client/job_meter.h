// SPDX-License-Identifier: Apache-2.0
#pragma once
// The costs of a trainer: JobMeter adds up the resources that its workers spend on it, and reads the energy of its GPU
// (GpuEnergy) through a separate thread (GpuEnergyMeter).

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/result.h"
#include "costs/cost_meter.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::pool_client {

inline constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

// The energy of a GPU, read with NVIDIA's management library, which is loaded on demand: penstock does not link it.
// GPUs since Volta count their energy, for the whole board and all programs together. Thread-compatible.
class GpuEnergy {
 public:
  // `uuid` is in the format of nvidia-smi -L, "GPU-...". Fails with kUnsupported and the reason if the library or the
  // GPU is missing, or the GPU does not count. Starting the library can take a second.
  static Result<std::unique_ptr<GpuEnergy>> open(const std::string& uuid, const std::string& library = kNvmlLibrary);

  GpuEnergy(const GpuEnergy&) = delete;
  GpuEnergy& operator=(const GpuEnergy&) = delete;
  ~GpuEnergy();

  // Microjoules since the driver was loaded.
  Result<uint64_t> read() const;

 private:
  using EnergyOf = int (*)(void* device, unsigned long long* millijoules);
  using ShutDown = int (*)();

  GpuEnergy() = default;

  void* library_ = nullptr;
  void* device_ = nullptr;
  EnergyOf energy_of_ = nullptr;
  ShutDown shut_down_ = nullptr;  // null until the library was started
};

// Reads a GPU's energy on a separate thread: a driver can hang, which must delay neither batches nor the end of a
// program. For this reason the thread is detached, owns all data that it uses, and ends by itself after the meter's
// destruction.
//
// Confined to one thread.
class GpuEnergyMeter {
 public:
  // Takes the arguments of GpuEnergy::open.
  GpuEnergyMeter(const std::string& uuid, const std::string& library);
  GpuEnergyMeter(const GpuEnergyMeter&) = delete;
  GpuEnergyMeter& operator=(const GpuEnergyMeter&) = delete;
  ~GpuEnergyMeter();

  // Returns the latest reading, and requests the next one. Unknown before the library has started, after the first
  // failure to read the energy, and if no thread could be started.
  wire::GpuMeter take();

 private:
  struct State {
    BoundedQueue<bool> asked{1};  // closed by the meter's destructor
    Board<wire::GpuMeter> meter;
  };
  static void run(State& state, const std::string& uuid, const std::string& library);

  const std::shared_ptr<State> state_ = std::make_shared<State>();  // shared with the thread
};

// The costs of a trainer: the resources that its workers spend on it, and the energy of its GPU. Confined to the
// loading thread, except where a comment states otherwise.
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
