// SPDX-License-Identifier: Apache-2.0
#pragma once
// A job that a C++ trainer sends to worker processes: which plug-in or Python factory makes the dataset, and how its
// batches are made. It is JSON in place of a Python job's header (PROTOCOL.md, "Jobs"): the JSON, and its length as
// u64.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>

#include "base/result.h"
#include "penstock/any_dataset.h"
#include "penstock/value.h"
#include "wire/blob_record.h"

namespace penstock::dataset {

// A value type.
struct JobText {
  std::string name;  // for messages
  std::variant<PluginDataset, PythonDataset> dataset;
  std::optional<int64_t> batch_size = 1;
  bool drop_last = false;
  int64_t shard_count = 1;
  std::optional<wire::BlobId> transform = {};  // the blob of a scripted module
};

std::string write_job(const JobText& job);

// Returns kUnsupported for a job of a Python trainer, or one made by another version of penstock or torch; kMalformed
// for bytes that are not a job.
Result<JobText> read_job(std::span<const std::byte> blob);

}  // namespace penstock::dataset
