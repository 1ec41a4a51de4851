// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kernels that widen narrow tensors, on a stream. Only built if CMake finds nvcc and a CUDA build of torch; without
// them tensors are widened before they are copied. The code of a kernel thread is in wire/widen_thread.h. This needs
// neither torch's headers nor CUDA's. The functions return cudaError_t codes; all calls apply to the current device.

#include <cstddef>
#include <cstdint>

#include "wire/narrow.h"

struct CUstream_st;  // the target of cudaStream_t

namespace penstock::device {

// Returns 0 if the device can run the kernels of this build.
int try_widen_kernels();

// Device memory that start_widening() needs in addition to the tensor's, in bytes.
int widen_scratch_bytes(const wire::Widening& widening, uint64_t& bytes);

struct WidenMemory {
  const std::byte* narrow = nullptr;  // all three pointers are multiples of 256
  std::byte* scratch = nullptr;
  uint64_t scratch_bytes = 0;
  std::byte* target = nullptr;
};

// Makes `stream` widen a tensor after all work that was started on it. The narrow bytes must have been checked on the
// host: there are no checks here.
int start_widening(const wire::Widening& widening, const WidenMemory& memory, CUstream_st* stream);

}  // namespace penstock::device
