// SPDX-License-Identifier: Apache-2.0
#pragma once
// While a thread captures a CUDA graph in the default mode, which is global, calls of other threads such as
// cudaEventQuery, cudaMalloc and cudaHostRegister fail and make the capture fail, too. A thread may make them if it is
// in relaxed mode itself.

namespace penstock::loader {

struct CudaEntries;

// Keeps the constructing thread in relaxed mode until destruction. Has no effect if the CUDA library cannot be loaded
// (cuda_device.h), which the first instance attempts. Confined to that thread.
class RelaxedCapture {
 public:
  RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  const CudaEntries* cuda_;
  int mode_before_ = 0;  // a cudaStreamCaptureMode
  bool is_relaxed_ = false;
};

}  // namespace penstock::loader
