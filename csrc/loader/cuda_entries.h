// SPDX-License-Identifier: Apache-2.0
#pragma once
// The interface of the CUDA library, libpenstock_cuda.so, for the library that loads it. The two are compiled together
// and share their types; `built_for` and `size` detect a file from a different build.

#include <cstddef>
#include <memory>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

struct CudaEntries {
  size_t size;            // of this struct
  const char* built_for;  // kCudaBuild of the CUDA library

  Result<std::unique_ptr<Device>> (*make_device)(int device_index);
  // make_cuda_watched_memory()
  Result<std::unique_ptr<WatchedMemory>> (*make_watched_memory)();

  // Puts the calling thread into the relaxed mode of relaxed_capture.h, or returns false. `mode_before` is for
  // restore_capture().
  bool (*try_relax_capture)(int& mode_before);
  void (*restore_capture)(int mode_before);
};

inline constexpr const char* kCudaBuild = "penstock " PENSTOCK_BUILD_VERSION ", torch " PENSTOCK_BUILT_FOR_TORCH;
inline constexpr const char* kCudaEntriesName = "penstock_cuda_entries";

}  // namespace penstock::loader
