// SPDX-License-Identifier: Apache-2.0
#pragma once
// The workers of a loader, whichever they are: threads of this process, processes of this machine, or those of a pool.

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
#include "api/told_threads.h"
#include "loader/client.h"
#include "loader/leaf_withholding.h"
#include "penstock/data_loader.h"
#include "wire/epoch_seeds.h"

namespace penstock {
class BatchOrigin;
}

namespace penstock::api {

// What a loader has to know of its dataset before the first epoch.
struct DatasetShape {
  bool is_iterable = false;
  int64_t sample_count = 0;  // of a map-style one
};

// Thread-compatible: for the trainer's thread.
class WorkerSet {
 public:
  using Message = SharedPrefixes::Message;

  WorkerSet() = default;
  WorkerSet(const WorkerSet&) = delete;
  WorkerSet& operator=(const WorkerSet&) = delete;
  virtual ~WorkerSet() = default;

  virtual DatasetShape shape() const = 0;
  // To be called once, before anything below.
  virtual void start() = 0;
  virtual const std::shared_ptr<loader::Client>& client() const = 0;
  // Where shards of an iterable dataset begin in the epoch that begins next, of these seeds; all others at their
  // beginning.
  virtual void set_starts(const wire::EpochSeeds& seeds, const ResumePoint& point) = 0;
  // Batches that are asked for from now on are made with these prefixes of a module, beside those of others.
  void set_prefixes(const void* module, std::vector<Message> messages);
  // Batches say from now on what an offloaded module has to know of them (BatchOrigin).
  void note_origins() { notes_origins_ = true; }
  bool notes_origins() const { return notes_origins_; }
  // What the loader's steps cost, measured from the first time on that somebody asks for it.
  const std::shared_ptr<StepMeter>& measure_steps() {
    if (!meter_) meter_ = std::make_shared<StepMeter>();
    return meter_;
  }
  StepMeter* meter() const { return meter_.get(); }  // null while nobody has asked
  // Decides which leaves stay with the workers. Null where all of them come.
  loader::LeafWithholding* withholding() { return withholding_ ? &*withholding_ : nullptr; }
  // Tells the workers what was decided.
  void obey(const std::optional<loader::LeafWithholding::Order>& order);
  // A leaf that had stayed with its worker was read.
  void note_recall(uint32_t leaf);
  // Of this batch leaves stayed with the workers. They come before the workers go, where the batch lives still.
  void note_incomplete(const std::shared_ptr<BatchOrigin>& origin);
  // The whole of a batch that came without some of its leaves. Blocks. Throws Error kClosed where nobody can be asked
  // any more, kTimeout, and kDataset where it had to be made again and could not be.
  std::unique_ptr<loader::Batch> recall(const loader::Batch::Origin& origin);
  // The device that batches come on; none for the host.
  virtual std::optional<c10::Device> device() const = 0;
  // Whether others than the trainer's own thread make batches.
  virtual bool is_parallel() const { return true; }
  // Whether batches cross a link.
  virtual bool is_elsewhere() const { return false; }
  // How an error names the worker that it comes from: "in DataLoader worker thread 3".
  virtual std::string place_of(const std::string& worker) const = 0;
  // To be called when nothing has come for a while. Throws Error kWorker where nothing can come any more.
  virtual void check() {}

 protected:
  // Leaves may stay with the workers from now on. A recall that takes longer than `timeout` throws; 0: none does.
  void withhold_leaves(std::chrono::milliseconds timeout) {
    withholding_.emplace();
    recall_timeout_ = timeout;
  }
  // Has those come that the program may still read. To be called while the workers can be asked.
  void recall_all() noexcept;

 private:
  virtual void use_prefixes(std::vector<Message> messages) = 0;
  // What batches leave out from now on: a shipment (wire/shipment.h), or nothing.
  virtual void use_shipment(std::optional<std::vector<std::byte>>) {}

  bool notes_origins_ = false;
  std::shared_ptr<StepMeter> meter_;                      // shared with offloaded modules, which may outlive the loader
  std::map<const void*, std::vector<Message>> prefixes_;  // by module
  std::optional<loader::LeafWithholding> withholding_;
  std::vector<std::weak_ptr<BatchOrigin>> incomplete_;
  std::chrono::milliseconds recall_timeout_{0};
  std::optional<std::chrono::steady_clock::time_point> recalls_end_;  // once the workers are to go
};

// The workers that the dataset and the options ask for. `options` outlive them. Threads are started by start() alone;
// processes are there when this returns.
std::unique_ptr<WorkerSet> make_workers(const AnyDataset& dataset, const Options& options);

// In how many shards they read the dataset.
uint32_t shard_count_of(const DatasetShape& shape, const Options& options);

}  // namespace penstock::api
