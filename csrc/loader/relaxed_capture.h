// SPDX-License-Identifier: Apache-2.0
#pragma once
// While a thread captures a CUDA graph in the default mode, which is global, calls of other threads such as
// cudaEventQuery, cudaMalloc and cudaHostRegister fail and make the capture fail, too. In the relaxed mode of its own a
// thread may make them.

namespace penstock::loader {

struct CudaEntries;

// The thread that makes it is in the relaxed mode until it is destroyed. Does nothing where the CUDA part cannot be
// loaded (cuda_device.h), which the first one tries. Confined to that thread.
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
