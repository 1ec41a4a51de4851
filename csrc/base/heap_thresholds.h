// SPDX-License-Identifier: Apache-2.0
#pragma once
// ZeroMQ allocates each message that it receives, and frees it soon after. glibc returns the pages of such blocks to
// the kernel and gets others for the next message, at one page fault each, unless a larger block was freed before:
// freeing a mapped block of up to 32 MB raises the sizes from which glibc maps blocks and trims heaps (mallopt(3),
// M_MMAP_THRESHOLD), which most programs do sooner or later.

namespace penstock {

// Frees such a block, so that messages reuse the same memory. Has no effect if the user has set glibc's thresholds, or
// with another allocator. Thread-safe.
void raise_heap_thresholds();

}  // namespace penstock
