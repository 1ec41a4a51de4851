// SPDX-License-Identifier: Apache-2.0
#pragma once
// The workers of a loader, whichever they are: threads of this process, processes of this machine, or those of a pool.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "api/told_threads.h"
#include "loader/client.h"
#include "penstock/data_loader.h"
#include "wire/epoch_seeds.h"

namespace penstock::api {

// Thread-compatible: for the trainer's thread.
class WorkerSet {
 public:
  using Message = SharedPrefixes::Message;

  WorkerSet() = default;
  WorkerSet(const WorkerSet&) = delete;
  WorkerSet& operator=(const WorkerSet&) = delete;
  virtual ~WorkerSet() = default;

  virtual const std::shared_ptr<loader::Client>& client() const = 0;
  // Where shards of the epoch that begins next begin.
  virtual void set_starts(const wire::EpochSeeds& seeds, std::map<uint32_t, SharedStarts::ShardStart> starts) = 0;
  // Batches that are asked for from now on are made with these prefixes.
  virtual void set_prefixes(std::vector<Message> messages) = 0;
  // How an error names the worker that it comes from: "in DataLoader worker thread 3".
  virtual std::string place_of(const std::string& worker) const = 0;
};

// Starts the workers that the dataset and the options ask for.
std::unique_ptr<WorkerSet> start_workers(const AnyDataset& dataset, const Options& options);

// In how many shards they read the dataset.
uint32_t shard_count_of(const AnyDataset& dataset, const Options& options);

}  // namespace penstock::api
