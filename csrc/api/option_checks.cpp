// SPDX-License-Identifier: Apache-2.0
#include "api/option_checks.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <string>

#include "api/batch_transform.h"
#include "api/exceptions.h"

namespace penstock::api {
namespace {

constexpr int64_t kWorkersMax = 1024;

void check_range(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value < min || value > max) {
    refuse(std::string(name) + " is " + std::to_string(value) + ", but must be from " + std::to_string(min) + " to " +
           std::to_string(max) + ", inclusive");
  }
}

}  // namespace

void check_options(const AnyDataset& dataset, const Options& options) {
  const bool is_made_elsewhere =
      std::holds_alternative<PluginDataset>(dataset.kind()) || std::holds_alternative<PythonDataset>(dataset.kind());
  const bool makes_here = options.num_workers == 0 && !options.pool;
  if (!is_made_elsewhere && !dataset.as_streams() && !dataset.by_index())
    refuse("dataset must be a Dataset or an IterableDataset, got null");
  if (options.batch_size && *options.batch_size < 1) {
    refuse("batch_size should be a positive integer value, but got batch_size=" + std::to_string(*options.batch_size));
  }
  if (!options.batch_size && options.drop_last)
    refuse("batch_size=None option disables auto-batching and is mutually exclusive with shuffle, and drop_last");
  if (options.sampler && options.shuffle) refuse("sampler option is mutually exclusive with shuffle");
  check_range("num_workers", options.num_workers, 0, kWorkersMax);
  check_range("prefetch_factor", options.prefetch_factor, 1, 1 << 16);
  check_range("prefetch_bytes", options.prefetch_bytes, 0, INT64_MAX);
  if (options.prefetch_bytes > 0 && makes_here) {
    refuse("prefetch_bytes=" + std::to_string(options.prefetch_bytes) +
           " requires workers, got num_workers=0; use workers or omit it");
  }
  if (options.timeout.count() < 0) refuse("timeout option should be non-negative");
  if (options.timeout.count() > 0 && makes_here) {
    refuse("timeout requires workers, got num_workers=0; use workers or omit it");
  }
  if (options.shards) {
    check_range("shards", *options.shards, 1, 1 << 20);
  }
  if (options.device && (options.device->is_meta() || !c10::impl::hasDeviceGuardImpl(options.device->type()))) {
    throw Error(ErrorKind::kUnsupported,
                "device is " + options.device->str() + ", but must be the CPU or a device that torch supports here");
  }
  if (options.generator && options.generator->device().type() != c10::DeviceType::CPU)
    refuse("generator is on device " + options.generator->device().str() + ", but must be a CPU generator");
  if (options.transform && options.num_workers > 0 && !is_made_elsewhere) check_draws_nothing(*options.transform);
}

std::optional<c10::Device> staged_device(const Options& options) {
  return options.device && !options.device->is_cpu() ? options.device : std::nullopt;
}

void check_options_of(const DatasetShape& shape, const Options& options) {
  if (shape.is_iterable && options.shuffle)
    refuse("DataLoader with IterableDataset: expected unspecified shuffle option, but got shuffle=true");
  if (shape.is_iterable && options.sampler)
    refuse("DataLoader with IterableDataset: expected unspecified sampler option, but got a sampler");
  if (shape.is_iterable && options.shard_by_rank) {
    refuse(
        "shard_by_rank does not support an IterableDataset, which has no order that ranks can share; let it "
        "read the part of its rank, or use a map-style dataset");
  }
  if (!shape.is_iterable && options.shards) {
    refuse("shards=" + std::to_string(*options.shards) +
           " requires an IterableDataset, but the dataset is read by index; omit the option");
  }
  if (!shape.is_iterable && options.shuffle && shape.sample_count < 1) {
    refuse("num_samples should be a positive integer value, but got num_samples=" + std::to_string(shape.sample_count));
  }
}

}  // namespace penstock::api
