// SPDX-License-Identifier: Apache-2.0
#include "base/heap_thresholds.h"

#include <cstdlib>

namespace penstock {
namespace {

constexpr size_t kBlockBytes = 31 << 20;  // below the largest threshold, 32 MiB with what glibc adds

}  // namespace

void raise_heap_thresholds() {
  void* volatile block = std::malloc(kBlockBytes);  // volatile: else the compiler leaves both out
  std::free(block);
}

}  // namespace penstock
