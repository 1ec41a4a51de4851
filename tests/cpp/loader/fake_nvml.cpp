// SPDX-License-Identifier: Apache-2.0
// A library with the functions of NVIDIA's management library that penstock calls, and one GPU, which has used as many
// millijoules as the environment says: FAKE_NVML_MJ. Without a value the GPU does not count.
#include <cstdlib>
#include <cstring>

#include "fake_nvml.h"

namespace {

constexpr int kSuccess = 0, kUninitialized = 1, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6;
int start_count = 0;
int the_gpu = 0;

}  // namespace

extern "C" {

[[gnu::visibility("default")]] int nvmlInit_v2() {
  ++start_count;
  return kSuccess;
}
[[gnu::visibility("default")]] int nvmlShutdown() { return start_count-- > 0 ? kSuccess : kUninitialized; }
[[gnu::visibility("default")]] int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (start_count == 0) return kUninitialized;
  if (std::strcmp(uuid, penstock::loader::kFakeGpuUuid) != 0) return kNotFound;
  *device = &the_gpu;
  return kSuccess;
}
[[gnu::visibility("default")]] int nvmlDeviceGetTotalEnergyConsumption(void* device, unsigned long long* millijoules) {
  if (start_count == 0) return kUninitialized;
  if (device != &the_gpu) return kInvalidArgument;
  const char* const used = std::getenv("FAKE_NVML_MJ");
  if (used == nullptr) return kNotSupported;
  *millijoules = std::strtoull(used, nullptr, 10);
  return kSuccess;
}
}
