// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the CUDA library calls the runtime and torch: errors are Results, and no call disturbs a CUDA graph that another
// thread is capturing (RelaxedCapture). Only for files of libpenstock_cuda.so.

#include <cuda_runtime_api.h>

#include <utility>

#include "base/result.h"
#include "device/cuda_part.h"
#include "device/device.h"

namespace penstock::device {

inline Result<void> result_of(int code_of_cuda) {
  const auto status = static_cast<cudaError_t>(code_of_cuda);
  if (status == cudaSuccess) return {};
  cudaGetLastError();  // clears the error, which would otherwise surface in an unrelated call by torch
  const auto code = status == cudaErrorMemoryAllocation ? Errc::kNoMemory : Errc::kFailed;
  return Fault{code, cudaGetErrorString(status)};
}

// RelaxedCapture for code in this library.
class Relaxed {
 public:
  Relaxed() : is_relaxed_(try_relax_capture(mode_before_)) {}
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;
  ~Relaxed() {
    if (is_relaxed_) restore_capture(mode_before_);
  }

 private:
  int mode_before_ = 0;
  const bool is_relaxed_;
};

// caught() in relaxed mode.
template <typename Call>
auto guarded(Call call) -> decltype(call()) {
  const Relaxed relaxed;
  return caught(std::move(call));
}

}  // namespace penstock::device
