// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker allocates the same large blocks for every batch. With glibc's defaults each block above 32 MB is mapped and
// unmapped again, and each trim of the heap returns pages to the system, so every batch has page faults for memory that
// the process had a moment before. Avoiding this is worth 2x to 4x on image transforms, more than any change to the
// code that runs them.

namespace penstock::worker {

// Keeps freed memory in this process's heap. For worker processes only; the trainer's process is the user's.
// Thread-safe.
void tune_malloc();

}  // namespace penstock::worker
