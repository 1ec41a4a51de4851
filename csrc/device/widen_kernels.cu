// SPDX-License-Identifier: Apache-2.0
#include "device/widen_kernels.h"

#include <cuda_runtime_api.h>
#include <cub/device/device_scan.cuh>

#include "wire/widen_thread.h"

namespace penstock::device {
namespace {

using wire::Encoding;
using wire::Widening;

template <typename Thread>
__global__ void widen_kernel(Thread thread) {
  thread(wire::GridPlace{.column = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                         .row = uint64_t{blockIdx.y} * blockDim.y + threadIdx.y,
                         .column_step = uint64_t{gridDim.x} * blockDim.x,
                         .row_step = uint64_t{gridDim.y} * blockDim.y});
}

struct Sum {
  __host__ __device__ uint64_t operator()(uint64_t left, uint64_t right) const { return left + right; }
};

// The start of each padded row's values is the sum of the lengths of the rows before it.
cudaError_t sum_lengths(void* scratch, size_t& scratch_bytes, const std::byte* narrow, uint64_t* starts,
                        uint64_t row_count, cudaStream_t stream) {
  const auto* lengths = narrow == nullptr ? nullptr : reinterpret_cast<const uint32_t*>(narrow + sizeof(uint64_t));
  return cub::DeviceScan::ExclusiveScan(scratch, scratch_bytes, lengths, starts, Sum{}, uint64_t{0}, row_count, stream);
}

// The starts precede the scratch memory of the sum.
uint64_t starts_bytes(const Widening& widening) { return (widening.row_count * sizeof(uint64_t) + 255) / 256 * 256; }

}  // namespace

int try_widen_kernels() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, widen_kernel<wire::BitsThread>);
  if (status != cudaSuccess) cudaGetLastError();  // clears the error
  return status;
}

int widen_scratch_bytes(const Widening& widening, uint64_t& bytes) {
  bytes = 0;
  if (widening.encoding != Encoding::kPadded) return cudaSuccess;
  size_t sum_bytes = 0;
  const cudaError_t status = sum_lengths(nullptr, sum_bytes, nullptr, nullptr, widening.row_count, nullptr);
  bytes = starts_bytes(widening) + sum_bytes;
  return status;
}

int start_widening(const Widening& widening, const WidenMemory& memory, CUstream_st* stream) {
  wire::WidenBuffers buffers{.narrow = memory.narrow, .target = memory.target};
  if (widening.encoding == Encoding::kPadded) {
    auto* const starts = reinterpret_cast<uint64_t*>(memory.scratch);
    size_t sum_bytes = memory.scratch_bytes - starts_bytes(widening);
    const cudaError_t status = sum_lengths(memory.scratch + starts_bytes(widening), sum_bytes, memory.narrow, starts,
                                           widening.row_count, stream);
    if (status != cudaSuccess) return status;
    buffers.starts = starts;
  }
  const wire::GridSize size = wire::grid_for(widening);
  wire::with_thread(widening, buffers, [&](auto thread) {
    widen_kernel<<<dim3(size.column_blocks, size.row_blocks), dim3(size.block_columns, size.block_rows), 0, stream>>>(
        thread);
  });
  return cudaGetLastError();
}

}  // namespace penstock::device
