// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "penstock/any_dataset.h"

namespace penstock::api {

// Loads the library of a plug-in and creates its dataset. The library stays loaded. Throws Error kUnsupported if the
// library cannot be loaded, does not contain the dataset, or was built for another penstock or torch, and kDataset for
// exceptions of the factory.
AnyDataset make_dataset_of(const PluginDataset& plugin);

}  // namespace penstock::api
