// SPDX-License-Identifier: Apache-2.0
#include "loader/relaxed_capture.h"

#ifdef PENSTOCK_WITH_CUDA

#include <cuda_runtime_api.h>

namespace penstock::loader {

RelaxedCapture::RelaxedCapture() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  is_relaxed_ = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
  mode_before_ = mode;
}

RelaxedCapture::~RelaxedCapture() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_before_);
  if (is_relaxed_) cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace penstock::loader

#else

namespace penstock::loader {

RelaxedCapture::RelaxedCapture() = default;
RelaxedCapture::~RelaxedCapture() = default;

}  // namespace penstock::loader

#endif
