// SPDX-License-Identifier: Apache-2.0
#pragma once
// The only access to CUDA devices. Their implementation (cuda_part.h) is a separate library, libpenstock_cuda.so,
// installed in the same folder as the library that contains this code. It needs the libraries of a CUDA build of torch.
// It is loaded on first use, so the rest of penstock works with a torch without CUDA. It is never unloaded.

#include <memory>

#include "base/result.h"
#include "device/device.h"

namespace penstock::device {

struct CudaEntries;

// Fails with kUnsupported in a build without CUDA, with a torch without CUDA, and if there is no such device.
Result<std::unique_ptr<Device>> open_cuda_device(int device_index);

// Null in a build without CUDA, with a torch without CUDA, without a device, and if torch's copy reports are not
// available (cuda_host_reads.h). For the trainer's thread.
std::unique_ptr<WatchedMemory> open_cuda_watched_memory();

// While a thread captures a CUDA graph in the default mode, which is global, calls of other threads such as
// cudaEventQuery, cudaMalloc and cudaHostRegister fail and make the capture fail, too. A thread may make them if it is
// in relaxed mode itself.
//
// Keeps the constructing thread in relaxed mode until destruction. Has no effect if the CUDA library cannot be loaded,
// which the first instance attempts. Confined to that thread.
class RelaxedCapture {
 public:
  RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  const CudaEntries* cuda_;  // null if the library cannot be loaded
  int mode_before_ = 0;      // a cudaStreamCaptureMode
  bool is_relaxed_ = false;
};

}  // namespace penstock::device
