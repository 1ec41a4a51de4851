// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <optional>

namespace penstock::pool_client {

// Of the one GPU of fake_nvml.cpp.
inline constexpr char kFakeGpuUuid[] = "GPU-12345678-9abc-def0-1234-56789abcdef0";

inline constexpr int64_t kFakeGpuDoesNotCount = -1;

// That library, as a test handles it.
class FakeNvml {
 public:
  explicit FakeNvml(const char* library) : library_(::dlopen(library, RTLD_NOW | RTLD_LOCAL)) {}
  FakeNvml(const FakeNvml&) = delete;
  FakeNvml& operator=(const FakeNvml&) = delete;
  ~FakeNvml() {
    hang(false);
    fail_by_throwing(false);
    use(std::nullopt);
    ::dlclose(library_);
  }

  // The energy that the GPU has used; without a value it does not count.
  void use(std::optional<int64_t> millijoules) {
    reinterpret_cast<void (*)(int64_t)>(::dlsym(library_, "fake_nvml_use"))(millijoules.value_or(kFakeGpuDoesNotCount));
  }
  // Whether the driver answers no question any more.
  void hang(bool does_hang) { reinterpret_cast<void (*)(bool)>(::dlsym(library_, "fake_nvml_hang"))(does_hang); }
  // Whether the driver throws, and no exception of the standard library.
  void fail_by_throwing(bool does_throw) {
    reinterpret_cast<void (*)(bool)>(::dlsym(library_, "fake_nvml_throw"))(does_throw);
  }

 private:
  void* library_;
};

}  // namespace penstock::pool_client
