// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only access to CUDA devices. Their implementation (cuda_part.h) is a separate library, libpenstock_cuda.so,
// installed in the same folder as the library that contains this code. It needs the libraries of a CUDA build of torch.
// It is loaded on first use, so the rest of penstock works with a torch without CUDA. It is never unloaded.

#include <memory>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

struct CudaEntries;

// Null if the library cannot be loaded. Thread-safe; the first call may block while it reads the file.
const CudaEntries* cuda_part();

// Fails with kUnsupported in a build without CUDA, with a torch without CUDA, and if there is no such device.
Result<std::unique_ptr<Device>> open_cuda_device(int device_index);

// Null in a build without CUDA, with a torch without CUDA, without a device, and if torch's copy reports are not
// available (cuda_host_reads.h). For the trainer's thread.
std::unique_ptr<WatchedMemory> open_cuda_watched_memory();

}  // namespace penstock::loader
