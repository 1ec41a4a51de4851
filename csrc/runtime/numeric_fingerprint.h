// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this process's kernels compute of fixed operands, by family. It depends on the CPU's instruction set, on torch
// and on its libraries, and not on the process's settings, which are compared apart (kernel_settings.h).

#include "base/numerics.h"

namespace penstock::runtime {

// Computed at the first call, which takes some milliseconds, with one thread whatever the process has set. No generator
// moves.
const Numerics& numeric_fingerprint();

}  // namespace penstock::runtime
