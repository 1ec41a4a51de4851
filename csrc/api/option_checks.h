// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/worker_set.h"
#include "penstock/data_loader.h"

namespace penstock::api {

// Throws Error kValue for invalid or conflicting options, with Python's message if Python has the same error.
void check_options(const AnyDataset& dataset, const Options& options);
// The same for options whose validity depends on the dataset's shape.
void check_options_of(const DatasetShape& shape, const Options& options);

// The device that batches are copied to, unless it is the CPU.
std::optional<c10::Device> staged_device(const Options& options);

}  // namespace penstock::api
