// SPDX-License-Identifier: Apache-2.0
#pragma once
// Keys in memory, and other processes of the same user.

#include <sys/prctl.h>

namespace penstock {

// From now on only root reads or traces this process's memory and environment, and it leaves no core dump. A forked
// child inherits that, and a program that it starts does not. Of itself in /proc the process still reads all but what
// only the owner of a file may open, such as environ.
inline void close_memory() { ::prctl(PR_SET_DUMPABLE, 0); }

}  // namespace penstock
