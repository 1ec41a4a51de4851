// SPDX-License-Identifier: Apache-2.0
#include "loader/cuda_entries.h"

#include "loader/cuda_host_reads.h"
#include "loader/cuda_part.h"

// The only exported symbol of libpenstock_cuda.so.
extern "C" __attribute__((visibility("default"))) const penstock::loader::CudaEntries* penstock_cuda_entries() {
  using namespace penstock::loader;
  static constexpr CudaEntries entries = {.size = sizeof(CudaEntries),
                                          .built_for = kCudaBuild,
                                          .make_device = &make_cuda_device,
                                          .make_watched_memory = &make_cuda_watched_memory,
                                          .try_relax_capture = &try_relax_capture,
                                          .restore_capture = &restore_capture};
  return &entries;
}
