// SPDX-License-Identifier: Apache-2.0
#pragma once
// A digest, by kernel family, of the results that this process's kernels compute from fixed operands. It depends on the
// CPU's instruction set, on torch and on its libraries, but not on the process's settings, which are compared
// separately (kernel_settings.h).

#include "base/numerics.h"

namespace penstock::runtime {

// Computed at the first call, which takes some milliseconds, on one thread, independent of the process's setting.
// Does not advance any generator.
const Numerics& numeric_fingerprint();

}  // namespace penstock::runtime
