// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "penstock/any_dataset.h"

namespace penstock::api {

// Loads the library of a plug-in and has it make its dataset. The library stays loaded. Throws Error kUnsupported for a
// library that cannot be loaded, has no such dataset, or was built for another penstock or torch, and kDataset for what
// the factory throws.
AnyDataset make_dataset_of(const PluginDataset& plugin);

}  // namespace penstock::api
