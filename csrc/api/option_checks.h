// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/worker_set.h"
#include "penstock/data_loader.h"

namespace penstock::api {

// Throws Error kValue for options that have no meaning, alone or together, in Python's words where Python has the
// error.
void check_options(const AnyDataset& dataset, const Options& options);
// The same, of those whose meaning depends on what the dataset is.
void check_options_of(const DatasetShape& shape, const Options& options);

// The device that batches are copied to, if not the CPU.
std::optional<c10::Device> staged_device(const Options& options);

}  // namespace penstock::api
