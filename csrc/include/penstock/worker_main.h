// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "penstock/export.h"

namespace penstock {

// The main function of the installed program penstock-worker; returns its exit status. Use it to build a custom
// executable, for example one that links its datasets instead of loading them.
PENSTOCK_API int worker_main(int argument_count, char** arguments);

}  // namespace penstock
