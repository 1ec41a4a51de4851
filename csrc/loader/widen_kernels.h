// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kernels that widen what came narrow, on a stream. Only where CMake finds nvcc beside a CUDA build of torch; without
// them tensors are widened before they are copied. What a thread does is in wire/widen_thread.h. No header of torch's
// and none of CUDA's is needed here. The codes are those of cudaError_t; all calls are about the current device.

#include <cstddef>
#include <cstdint>

#include "wire/widening.h"

struct CUstream_st;  // cudaStream_t points to it

namespace penstock::loader {

// 0 where the device can run the kernels that this build has.
int try_widen_kernels();

// Bytes that start_widening() needs beside those of the tensor.
int widen_scratch_bytes(const wire::Widening& widening, uint64_t& bytes);

struct WidenMemory {
  const std::byte* narrow = nullptr;  // all three at multiples of 256
  std::byte* scratch = nullptr;
  uint64_t scratch_bytes = 0;
  std::byte* target = nullptr;
};

// Has `stream` widen a tensor behind all that was started on it. The narrow bytes were checked on the host, for
// nothing is checked here.
int start_widening(const wire::Widening& widening, const WidenMemory& memory, CUstream_st* stream);

}  // namespace penstock::loader
