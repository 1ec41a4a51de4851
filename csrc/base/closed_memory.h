// SPDX-License-Identifier: Apache-2.0
#pragma once
// Protects keys in memory from other processes of the same user.

#include <sys/prctl.h>

namespace penstock {

// Afterwards only root can read or trace this process's memory and environment, and the process leaves no core dump. A
// forked child inherits this; a program that it executes does not. The process can still read its own entries in /proc,
// except files that only their owner may open, such as environ.
inline void close_memory() { ::prctl(PR_SET_DUMPABLE, 0); }

}  // namespace penstock
