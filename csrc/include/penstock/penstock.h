// SPDX-License-Identifier: Apache-2.0
#pragma once
// All of penstock for a C++ program:
//
//   #include <penstock/penstock.h>         find_package(Penstock REQUIRED)
//                                          target_link_libraries(train penstock::penstock)
//
// Every call may throw penstock::Error (dataset.h), and the exceptions of torch.

#include "penstock/any_dataset.h"  // IWYU pragma: export
#include "penstock/batch.h"        // IWYU pragma: export
#include "penstock/data_loader.h"  // IWYU pragma: export
#include "penstock/dataset.h"      // IWYU pragma: export
#include "penstock/error.h"        // IWYU pragma: export
#include "penstock/export.h"       // IWYU pragma: export
#include "penstock/fields.h"       // IWYU pragma: export
#include "penstock/filtered.h"     // IWYU pragma: export
#include "penstock/offload.h"      // IWYU pragma: export
#include "penstock/options.h"      // IWYU pragma: export
#include "penstock/packer.h"       // IWYU pragma: export
#include "penstock/plugin.h"       // IWYU pragma: export
#include "penstock/sampler.h"      // IWYU pragma: export
#include "penstock/state.h"        // IWYU pragma: export
#include "penstock/torch_data.h"   // IWYU pragma: export
#include "penstock/value.h"        // IWYU pragma: export
