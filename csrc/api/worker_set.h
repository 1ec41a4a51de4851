// SPDX-License-Identifier: Apache-2.0
#pragma once
// A WorkerSet holds the workers of a loader: threads of this process, processes on this machine, or pool workers.
// make_workers() creates the set that the options require, and check_options() rejects invalid options.

#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/loader_state.h"
#include "api/step_meter.h"
#include "api/thread_maker.h"
#include "loader/client.h"
#include "penstock/data_loader.h"
#include "pool_client/leaf_withholding.h"
#include "wire/epoch_seeds.h"

namespace penstock {
class BatchOrigin;
}

namespace penstock::api {

// The properties of the dataset that a loader needs before the first epoch.
struct DatasetShape {
  bool is_iterable = false;
  int64_t sample_count = 0;  // of a map-style dataset
};

// The workers of one loader, and the data that offloaded modules exchange with them. Thread-compatible: for the
// trainer's thread.
class WorkerSet {
 public:
  using Message = SharedPrefixes::Message;

  WorkerSet() = default;
  WorkerSet(const WorkerSet&) = delete;
  WorkerSet& operator=(const WorkerSet&) = delete;
  virtual ~WorkerSet() = default;

  virtual DatasetShape shape() const = 0;
  // Call once, before any function below.
  virtual void start() = 0;
  virtual const std::shared_ptr<loader::Client>& client() const = 0;
  // Sets where shards of an iterable dataset start in the next epoch, which has these seeds; all others start at
  // position 0.
  virtual void set_starts(const wire::EpochSeeds& seeds, const ResumePoint& point) = 0;
  // Batches requested from now on are made with these prefixes of a module, in addition to those of other modules.
  void set_prefixes(const void* module, std::vector<Message> messages);
  // From now on, batches carry the data that an offloaded module needs (BatchOrigin).
  void note_origins() { notes_origins_ = true; }
  bool notes_origins() const { return notes_origins_; }
  // The costs of the loader's steps, measured from the first call of this function on.
  const std::shared_ptr<StepMeter>& measure_steps() {
    if (!meter_) meter_ = std::make_shared<StepMeter>();
    return meter_;
  }
  StepMeter* meter() const { return meter_.get(); }  // null before the first request
  // Decides which leaves stay with the workers. Null if all leaves are sent.
  pool_client::LeafWithholding* withholding() { return withholding_ ? &*withholding_ : nullptr; }
  // Sends a decision to the workers.
  void obey(const std::optional<pool_client::LeafWithholding::Order>& order);
  // A leaf that had stayed with its worker was read.
  void note_recall(uint32_t leaf);
  // Registers a batch with leaves that stayed with the workers. They are fetched before the workers shut down, if the
  // batch still exists.
  void note_incomplete(const std::shared_ptr<BatchOrigin>& origin);
  // Fetches the whole of a batch that arrived without some of its leaves. Blocks. Throws Error kClosed if no worker can
  // be asked any more, kTimeout, and kDataset if the batch had to be made again and this failed.
  std::unique_ptr<loader::Batch> recall(const loader::BatchRecord::Origin& origin);
  // The device that batches are delivered on; none for the host.
  virtual std::optional<c10::Device> device() const = 0;
  // Whether batches are made outside the trainer's thread.
  virtual bool is_parallel() const { return true; }
  // Whether batches cross a link.
  virtual bool is_elsewhere() const { return false; }
  // The worker's name in errors: "in DataLoader worker thread 3".
  virtual std::string place_of(const std::string& worker) const = 0;
  // Call when no batch has arrived for a while. Throws Error kWorker if none can arrive any more.
  virtual void check() {}

 protected:
  // Allows leaves to stay with the workers from now on. A recall that takes longer than `timeout` throws; 0: no limit.
  void withhold_leaves(std::chrono::milliseconds timeout) {
    withholding_.emplace();
    recall_timeout_ = timeout;
  }
  // Fetches the leaves that the program may still read. Call while the workers can still be asked.
  void recall_all() noexcept;

 private:
  virtual void use_prefixes(std::vector<Message> messages) = 0;
  // Sets the leaves that batches leave out from now on: a shipment (wire/blob_record.h), or none.
  virtual void use_shipment(std::optional<std::vector<std::byte>>) {}

  bool notes_origins_ = false;
  std::shared_ptr<StepMeter> meter_;                      // shared with offloaded modules, which may outlive the loader
  std::map<const void*, std::vector<Message>> prefixes_;  // by module
  std::optional<pool_client::LeafWithholding> withholding_;
  std::vector<std::weak_ptr<BatchOrigin>> incomplete_;
  std::chrono::milliseconds recall_timeout_{0};
  std::optional<std::chrono::steady_clock::time_point> recalls_end_;  // set when the workers are about to shut down
};

// Creates the workers that the dataset and the options require. `options` must outlive them. Only start() starts
// threads; processes are running when this returns.
std::unique_ptr<WorkerSet> make_workers(const AnyDataset& dataset, const Options& options);

// The number of batches that may be delivered before the oldest one, or session::kAnyOrder.
uint32_t overtaking_max(const Options& options);

// The number of shards in which the workers read the dataset.
uint32_t shard_count_of(const DatasetShape& shape, const Options& options);

// Throws Error kValue for invalid or conflicting options, with Python's message if Python has the same error.
void check_options(const AnyDataset& dataset, const Options& options);
// The same for options whose validity depends on the dataset's shape.
void check_options_of(const DatasetShape& shape, const Options& options);

// The device that batches are copied to, unless it is the CPU.
std::optional<c10::Device> staged_device(const Options& options);

}  // namespace penstock::api
