// SPDX-License-Identifier: Apache-2.0
#pragma once
// The energy of a GPU, from NVIDIA's management library, which is looked for when it is needed: penstock links none of
// it. GPUs since Volta count their energy, for the whole board and all its programs together.

#include <cstdint>
#include <memory>
#include <string>

#include "base/board.h"
#include "base/bounded_queue.h"
#include "base/result.h"
#include "wire/reports.h"

namespace penstock::loader {

inline constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

// Thread-compatible.
class GpuEnergy {
 public:
  // `uuid` is as nvidia-smi -L shows it, "GPU-...". kUnsupported with the reason where the library or the GPU is not
  // there, or the GPU does not count. Starting the library can take a second.
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

// Reads the energy of a GPU on a thread of its own, since a driver can hang, which is to hold up no batch and no end of
// a program. So the thread is detached, owns all that it uses, and ends by itself once the meter is gone.
//
// Confined to one thread.
class GpuEnergyMeter {
 public:
  // Of GpuEnergy::open.
  GpuEnergyMeter(const std::string& uuid, const std::string& library);
  GpuEnergyMeter(const GpuEnergyMeter&) = delete;
  GpuEnergyMeter& operator=(const GpuEnergyMeter&) = delete;
  ~GpuEnergyMeter();

  // The reading before this call, and has the next one made. Unknown before the library has started, from the first
  // time that the energy could not be read, and where there is no thread to read it.
  wire::GpuMeter take();

 private:
  struct State {
    BoundedQueue<bool> asked{1};  // closed once the meter is gone
    Board<wire::GpuMeter> meter;
  };
  static void run(State& state, const std::string& uuid, const std::string& library);

  const std::shared_ptr<State> state_ = std::make_shared<State>();  // shared with the thread
};

}  // namespace penstock::loader
