// SPDX-License-Identifier: Apache-2.0
#include "api/worker_set.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "api/exceptions.h"
#include "api/option_checks.h"
#include "api/plugin_loading.h"
#include "api/pool_workers.h"
#include "api/thread_maker.h"
#include "base/environment.h"
#include "loader/recycled_memory.h"
#include "loader/thread_source.h"

namespace penstock::api {
namespace {

// Freed memory of batches that is kept for later ones.
constexpr uint64_t kKeptBytesMax = 512ULL << 20;

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
                              .in_order = options.in_order,
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
  void set_prefixes(std::vector<Message> messages) override { prefixes_->set(std::move(messages)); }
  std::string place_of(const std::string& worker) const override {
    return has_threads_ ? " in DataLoader worker thread " + worker : "";
  }

 private:
  static constexpr size_t kStretched = 8;  // times as many requests as usual may be out

  const AnyDataset dataset_;
  const Options& options_;
  const bool has_threads_;
  DatasetShape shape_;
  std::shared_ptr<loader::RecycledMemory> memory_ = std::make_shared<loader::RecycledMemory>(kKeptBytesMax);
  std::shared_ptr<SharedPrefixes> prefixes_ = std::make_shared<SharedPrefixes>();
  std::shared_ptr<SharedStarts> starts_ = std::make_shared<SharedStarts>();
  std::shared_ptr<loader::Client> client_;
};

// The pool that the program or, for loaders with workers, the environment names.
std::optional<std::string> pool_of(const Options& options) {
  if (options.pool) return options.pool->empty() ? std::nullopt : options.pool;
  auto named = environment("PENSTOCK_POOL");
  return named && !named->empty() && options.num_workers > 0 ? named : std::nullopt;
}

}  // namespace

std::unique_ptr<WorkerSet> make_workers(const AnyDataset& dataset, const Options& options) {
  const auto* plugin = std::get_if<PluginDataset>(&dataset.kind());
  const bool is_of_program = dataset.by_index() || dataset.as_streams();
  auto pool = pool_of(options);
  if (is_of_program && options.pool && !options.pool->empty()) {
    refuse(
        "pool is " + *options.pool +
        " and the dataset is an object of this program, which cannot be sent; make it a plug-in (PENSTOCK_DATASET), or "
        "leave pool out");
  }
  if (is_of_program) return std::make_unique<ThreadWorkers>(dataset, options);
  if (!pool && options.num_workers == 0) {
    if (plugin != nullptr) return std::make_unique<ThreadWorkers>(make_dataset_of(*plugin), options);
    refuse(
        "the dataset is made in Python, and num_workers is 0 without a pool, where this process would make the "
        "batches; ask for worker processes (num_workers), or name a pool");
  }
  if (options.collate_fn) {
    refuse(
        "collate_fn is a function of this program, which worker processes do not have; collate in the dataset's "
        "get_batch(), or leave it out");
  }
  return std::make_unique<PoolWorkers>(dataset, options, std::move(pool));
}

uint32_t shard_count_of(const DatasetShape& shape, const Options& options) {
  if (shape.is_iterable && options.shards) return static_cast<uint32_t>(*options.shards);
  return static_cast<uint32_t>(std::max<int64_t>(1, options.num_workers));
}

}  // namespace penstock::api
