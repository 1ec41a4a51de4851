// SPDX-License-Identifier: Apache-2.0
// A library with the functions of NVIDIA's management library that penstock calls, and one GPU.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "fake_nvml.h"

namespace {

constexpr int kSuccess = 0, kUninitialized = 1, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6;
std::atomic<int> start_count{0};
std::atomic<int64_t> used_mj{penstock::pool_client::kFakeGpuDoesNotCount};
std::atomic<bool> is_hanging{false};
std::atomic<bool> is_throwing{false};
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
  if (std::strcmp(uuid, penstock::pool_client::kFakeGpuUuid) != 0) return kNotFound;
  *device = &the_gpu;
  return kSuccess;
}
[[gnu::visibility("default")]] int nvmlDeviceGetTotalEnergyConsumption(void* device, unsigned long long* millijoules) {
  if (start_count == 0) return kUninitialized;
  if (device != &the_gpu) return kInvalidArgument;
  is_hanging.wait(true);
  if (is_throwing.load()) throw 7;
  const int64_t used = used_mj.load();
  if (used < 0) return kNotSupported;
  *millijoules = static_cast<unsigned long long>(used);
  return kSuccess;
}

[[gnu::visibility("default")]] void fake_nvml_use(int64_t millijoules) { used_mj.store(millijoules); }
[[gnu::visibility("default")]] void fake_nvml_hang(bool does_hang) {
  is_hanging.store(does_hang);
  is_hanging.notify_all();
}
[[gnu::visibility("default")]] void fake_nvml_throw(bool does_throw) { is_throwing.store(does_throw); }
}
