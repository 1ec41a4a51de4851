// SPDX-License-Identifier: Apache-2.0
#pragma once
// The energy of a GPU, from NVIDIA's management library, which is looked for when it is needed: penstock links none of
// it. GPUs since Volta count their energy, for the whole board and all its programs together.

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

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

}  // namespace penstock::loader
