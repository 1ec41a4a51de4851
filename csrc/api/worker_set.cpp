// SPDX-License-Identifier: Apache-2.0
#include "api/worker_set.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "api/batch_origin.h"
#include "api/exceptions.h"
#include "api/module_call.h"
#include "api/native_job.h"
#include "api/pool_workers.h"
#include "api/thread_maker.h"
#include "base/process.h"
#include "loader/thread_source.h"
#include "wire/blob_record.h"

namespace penstock::api {

using std::chrono::steady_clock;

namespace {

// The amount of freed batch memory that is kept for later batches.
constexpr uint64_t kKeptBytesMax = 512ULL << 20;
constexpr auto kRecallCheckInterval = std::chrono::seconds(1);  // how often a waiting trainer checks its workers
constexpr auto kLastRecalls = std::chrono::seconds(5);          // for all batches together, when the workers shut down

// Threads of this process, or the trainer's own thread.
class ThreadWorkers final : public WorkerSet {
 public:
  ThreadWorkers(AnyDataset its_dataset, const Options& options)
      : dataset_(std::move(its_dataset)), options_(options), has_threads_(options.num_workers > 0) {
    shape_.is_iterable = dataset_.as_streams() != nullptr;
    if (!shape_.is_iterable) shape_.sample_count = dataset_.by_index()->size();
  }
  ~ThreadWorkers() override {
    if (client_) client_->stop();
  }

  DatasetShape shape() const override { return shape_; }
  bool is_parallel() const override { return has_threads_; }

  void start() override {
    const Options& options = options_;
    const AnyDataset& dataset = dataset_;
    const bool is_iterable = shape_.is_iterable;
    const auto worker_count = static_cast<uint32_t>(std::max<int64_t>(1, options.num_workers));
    const auto depth = static_cast<uint32_t>(has_threads_ ? options.prefetch_factor : 1);
    std::vector<std::unique_ptr<loader::ThreadMaker>> makers;
    for (uint32_t worker_id = 0; worker_id < worker_count; ++worker_id) {
      auto own = worker_count > 1 && !is_iterable ? dataset.by_index()->clone() : nullptr;
      auto reader =
          std::make_unique<dataset::BatchReader>(own ? std::move(own) : dataset.by_index(), dataset.as_streams(),
                                                 dataset::ReaderOptions{.batch_size = options.batch_size,
                                                                        .drop_last = options.drop_last,
                                                                        .shard_count = shard_count_of(shape_, options),
                                                                        .collate_fn = options.collate_fn});
      std::optional<BatchTransform> transform;
      if (options.transform) transform.emplace(*options.transform);
      makers.push_back(std::make_unique<ThreadMaker>(
          std::move(reader), std::move(transform),
          ThreadMaker::Shared{.memory = memory_, .prefixes = prefixes_, .starts = starts_}));
    }
    const loader::ThreadSourceOptions of_source{.is_iterable = is_iterable,
                                                .arrival_count_max = size_t{worker_count} * (depth + 4) * kStretched};
    auto source = std::make_unique<loader::ThreadSource>(of_source, std::move(makers), has_threads_);
    client_ = std::make_shared<loader::Client>(
        loader::ClientOptions{.worker_count = worker_count,
                              .prefetch_factor = depth,
                              .shard_count = is_iterable ? shard_count_of(shape_, options) : worker_count,
                              .prefetch_bytes = static_cast<uint64_t>(options.prefetch_bytes),
                              .overtaking_max = overtaking_max(options),
                              .any_worker = !is_iterable && has_threads_,
                              .keep_workers = true,
                              .keep_indices = false,
                              .pin_memory = options.pin_memory && !options.device,
                              .device = staged_device(options)},
        std::move(source));
    api::check(client_->start());
  }

  const std::shared_ptr<loader::Client>& client() const override { return client_; }
  void set_starts(const wire::EpochSeeds& seeds, const ResumePoint& point) override {
    starts_->set(seeds, point.starts);
  }
  std::optional<c10::Device> device() const override { return staged_device(options_); }
  std::string place_of(const std::string& worker) const override {
    return has_threads_ ? " in DataLoader worker thread " + worker : "";
  }

 private:
  void use_prefixes(std::vector<Message> messages) override { prefixes_->set(std::move(messages)); }

  static constexpr size_t kStretched = 8;  // factor by which outstanding requests may exceed the usual number

  const AnyDataset dataset_;
  const Options& options_;
  const bool has_threads_;
  DatasetShape shape_;
  std::shared_ptr<loader::RecycledMemory> memory_ = std::make_shared<loader::RecycledMemory>(kKeptBytesMax);
  std::shared_ptr<SharedPrefixes> prefixes_ = std::make_shared<SharedPrefixes>();
  std::shared_ptr<SharedStarts> starts_ = std::make_shared<SharedStarts>();
  std::shared_ptr<loader::Client> client_;
};

// The pool named by the program or, for loaders with workers, by the environment.
std::optional<std::string> pool_of(const Options& options) {
  if (options.pool) return options.pool->empty() ? std::nullopt : options.pool;
  auto named = environment("PENSTOCK_POOL");
  return named && !named->empty() && options.num_workers > 0 ? named : std::nullopt;
}

}  // namespace

void WorkerSet::set_prefixes(const void* module, std::vector<Message> messages) {
  prefixes_[module] = std::move(messages);
  if (prefixes_[module].empty()) prefixes_.erase(module);
  std::vector<Message> all;
  for (const auto& [of, its] : prefixes_) all.insert(all.end(), its.begin(), its.end());
  use_prefixes(std::move(all));
}

void WorkerSet::obey(const std::optional<pool_client::LeafWithholding::Order>& order) {
  if (!order) return;
  use_shipment(order->shipment ? std::optional(wire::write_shipment(*order->shipment)) : std::nullopt);
  if (meter_) meter_->loads()->forget();  // batch sizes change from now on
}

void WorkerSet::note_recall(uint32_t leaf) {
  if (withholding_) obey(withholding_->note_recall(leaf));
}

void WorkerSet::note_incomplete(const std::shared_ptr<BatchOrigin>& origin) {
  std::erase_if(incomplete_, [](const auto& one) { return one.expired(); });
  incomplete_.push_back(origin);
}

std::unique_ptr<loader::Batch> WorkerSet::recall(const loader::BatchRecord::Origin& origin) {
  loader::Client& client = *this->client();
  auto end = steady_clock::time_point::max();
  if (recall_timeout_.count() > 0) end = steady_clock::now() + recall_timeout_;
  if (recalls_end_) end = std::min(end, *recalls_end_);
  try {
    client.recall(origin);
    for (;;) {
      const steady_clock::time_point now = steady_clock::now();
      if (now >= end)
        throw Error(recalls_end_ ? ErrorKind::kClosed : ErrorKind::kTimeout, "no worker has sent it in time");
      auto made = client.recalled(origin, std::min(now + kRecallCheckInterval, end));
      if (made) {
        std::unique_ptr<loader::Batch> batch = std::move(made).value();
        if (const auto& error = batch->record().remote_error()) raise_remote(*error, place_of(error->worker));
        return batch;
      }
      if (made.error().code != Errc::kTimeout) raise(made.error());
      check();
    }
  } catch (...) {
    client.forget_recall(origin);
    throw;
  }
}

void WorkerSet::recall_all() noexcept {
  recalls_end_ = steady_clock::now() + kLastRecalls;
  for (const auto& one : std::exchange(incomplete_, {})) {
    const std::shared_ptr<BatchOrigin> origin = one.lock();
    if (!origin) continue;
    try {
      origin->complete(*this);
    } catch (const std::exception&) {
      // A later read of the batch reports that its leaves can no longer be fetched.
    }
  }
}

std::unique_ptr<WorkerSet> make_workers(const AnyDataset& dataset, const Options& options) {
  const auto* plugin = std::get_if<PluginDataset>(&dataset.kind());
  const bool is_of_program = dataset.by_index() || dataset.as_streams();
  auto pool = pool_of(options);
  if (is_of_program && options.pool && !options.pool->empty()) {
    refuse(
        "pool is " + *options.pool +
        ", which requires a dataset that can be sent, but the dataset is an object of this program; make it a plug-in "
        "(PENSTOCK_DATASET), or omit pool");
  }
  if (is_of_program) return std::make_unique<ThreadWorkers>(dataset, options);
  if (!pool && options.num_workers == 0) {
    if (plugin != nullptr) return std::make_unique<ThreadWorkers>(make_dataset_of(*plugin), options);
    refuse(
        "a Python dataset requires worker processes or a pool, got num_workers=0 without a pool; set num_workers or "
        "pool");
  }
  if (options.collate_fn) {
    refuse(
        "collate_fn must not be a function of this program, because worker processes do not have it; collate in the "
        "dataset's get_batch(), or omit it");
  }
  return std::make_unique<PoolWorkers>(dataset, options, std::move(pool));
}

uint32_t overtaking_max(const Options& options) {
  if (const int64_t* window = std::get_if<int64_t>(&options.in_order)) return static_cast<uint32_t>(*window);
  return std::get<bool>(options.in_order) ? 0 : session::kAnyOrder;
}

uint32_t shard_count_of(const DatasetShape& shape, const Options& options) {
  if (shape.is_iterable && options.shards) return static_cast<uint32_t>(*options.shards);
  return static_cast<uint32_t>(std::max<int64_t>(1, options.num_workers));
}

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
  const int64_t* window = std::get_if<int64_t>(&options.in_order);
  if (window != nullptr && (*window < 2 || *window > session::kAnyOrder)) {
    refuse(
        "in_order must be true, false (any batch may overtake others) or the number of batches that may overtake the "
        "oldest one, from 2 to " +
        std::to_string(session::kAnyOrder) + ", got " + std::to_string(*window) + "; pass in_order = true for none");
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
  if (shape.is_iterable && options.commit != Commit::kNone) {
    throw Error(ErrorKind::kUnsupported,
                "commit=manual requires a map-style dataset, got an IterableDataset, whose batches can only be "
                "repeated in order; use a map-style dataset, or leave commit out");
  }
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
