// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CUDA library, libpenstock_cuda.so: its interface for the library that loads it (cuda_device.h), and the only
// access to device streams, a CUDA device whose copies run on a side stream. Every call is made with that device
// current, and does not disturb a CUDA graph that another thread is capturing (RelaxedCapture).
//
// The two libraries are compiled together and share their types; `built_for` and `size` detect a file from a different
// build.

#include <cstddef>
#include <memory>

#include "base/result.h"
#include "device/device.h"

namespace penstock::device {

struct CudaEntries {
  size_t size;            // of this struct
  const char* built_for;  // kCudaBuild of the CUDA library

  Result<std::unique_ptr<Device>> (*make_device)(int device_index);
  // make_cuda_watched_memory()
  Result<std::unique_ptr<WatchedMemory>> (*make_watched_memory)();

  // Puts the calling thread into the mode of RelaxedCapture, or returns false. `mode_before` is for restore_capture().
  bool (*try_relax_capture)(int& mode_before);
  void (*restore_capture)(int mode_before);
};

inline constexpr const char* kCudaBuild = "penstock " PENSTOCK_BUILD_VERSION ", torch " PENSTOCK_BUILT_FOR_TORCH;
inline constexpr const char* kCudaEntriesName = "penstock_cuda_entries";

// The functions below are in libpenstock_cuda.so only.

// Fails with kUnsupported if there is no such device.
Result<std::unique_ptr<Device>> make_cuda_device(int device_index);

bool try_relax_capture(int& mode_before);
void restore_capture(int mode_before);

}  // namespace penstock::device
