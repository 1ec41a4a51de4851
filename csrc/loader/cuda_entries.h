// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the CUDA part, libpenstock_cuda.so, offers to the library that loads it. The two are compiled together and know
// each other's types; `built_for` and `size` find a file that is of another build.

#include <cstddef>
#include <memory>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

struct CudaEntries {
  size_t size;            // of this
  const char* built_for;  // kCudaBuild of that build

  Result<std::unique_ptr<Device>> (*make_device)(int device_index);
  // make_cuda_watched_memory()
  Result<std::unique_ptr<WatchedMemory>> (*make_watched_memory)();

  // Puts the calling thread into the relaxed mode of relaxed_capture.h, or returns false. `mode_before` is for the
  // other.
  bool (*try_relax_capture)(int& mode_before);
  void (*restore_capture)(int mode_before);
};

inline constexpr const char* kCudaBuild = "penstock " PENSTOCK_BUILD_VERSION ", torch " PENSTOCK_BUILT_FOR_TORCH;
inline constexpr const char* kCudaEntriesName = "penstock_cuda_entries";

}  // namespace penstock::loader
