// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "penstock/export.h"

namespace penstock {

// The whole of the program penstock-worker, which is installed: its exit status. For a program that brings its own
// executable, as one that links its datasets in place of loading them.
PENSTOCK_API int worker_main(int argument_count, char** arguments);

}  // namespace penstock
