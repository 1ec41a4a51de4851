// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only door to CUDA devices. Their part (cuda_part.h) is a library of its own, libpenstock_cuda.so, which lies
// beside the one that has this code. It needs the libraries of a CUDA build of torch. Loaded when it is first asked
// for, it leaves the rest of penstock usable beside a torch without CUDA. It is never unloaded.

#include <memory>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

struct CudaEntries;

// Null where the part cannot be loaded. Thread-safe; the first call may block on reading the file.
const CudaEntries* cuda_part();

// kUnsupported in a build without CUDA, beside a torch without it, and where no such device is.
Result<std::unique_ptr<Device>> open_cuda_device(int device_index);

// Null in a build without CUDA, beside a torch without it, where no device is, and where torch's reports of copies
// cannot be had (cuda_host_reads.h). For the trainer's thread.
std::unique_ptr<WatchedMemory> open_cuda_watched_memory();

}  // namespace penstock::loader
