// SPDX-License-Identifier: Apache-2.0
#pragma once
// The workers of a loader, whichever they are: threads of this process, processes of this machine, or those of a pool.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/loader_state.h"
#include "api/told_threads.h"
#include "loader/client.h"
#include "penstock/data_loader.h"
#include "wire/epoch_seeds.h"

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
  // Batches that are asked for from now on are made with these prefixes.
  virtual void set_prefixes(std::vector<Message> messages) = 0;
  // Batches say from now on what an offloaded module has to know of them (BatchOrigin).
  void note_origins() { notes_origins_ = true; }
  bool notes_origins() const { return notes_origins_; }
  // Whether others than the trainer's own thread make batches.
  virtual bool is_parallel() const { return true; }
  // Whether batches cross a link.
  virtual bool is_elsewhere() const { return false; }
  // How an error names the worker that it comes from: "in DataLoader worker thread 3".
  virtual std::string place_of(const std::string& worker) const = 0;
  // To be called when nothing has come for a while. Throws Error kWorker where nothing can come any more.
  virtual void check() {}

 private:
  bool notes_origins_ = false;
};

// The workers that the dataset and the options ask for. `options` outlive them. Threads are started by start() alone;
// processes are there when this returns.
std::unique_ptr<WorkerSet> make_workers(const AnyDataset& dataset, const Options& options);

// In how many shards they read the dataset.
uint32_t shard_count_of(const DatasetShape& shape, const Options& options);

}  // namespace penstock::api
