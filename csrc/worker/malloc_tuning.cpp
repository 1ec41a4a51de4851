// SPDX-License-Identifier: Apache-2.0
#include "worker/malloc_tuning.h"

#include <features.h>  // defines __GLIBC__, which no other header here does

#ifdef __GLIBC__
#include <malloc.h>

#include <climits>
#endif

namespace penstock::worker {

void tune_malloc() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, INT_MAX);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

}  // namespace penstock::worker
