// SPDX-License-Identifier: Apache-2.0
#include "base/heap_thresholds.h"

#include <cstdlib>

namespace penstock {
namespace {

constexpr size_t kBlockBytes = 31 << 20;  // below the largest threshold, 32 MiB including glibc's overhead

}  // namespace

void raise_heap_thresholds() {
  void* volatile block = std::malloc(kBlockBytes);  // volatile: otherwise the compiler removes both calls
  std::free(block);
}

}  // namespace penstock
