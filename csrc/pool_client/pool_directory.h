// SPDX-License-Identifier: Apache-2.0
#pragma once
// The workers that a trainer may use (PoolDirectory), and the identity of the trainer's job and its rank in it, for the
// controller.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "wire/reports.h"

namespace penstock::pool_client {

// A worker that the trainer has started itself, in addition to the pool's.
struct OwnWorker {
  uint64_t worker_id = 0;
  net::Endpoint endpoint;
  std::string handover = {};  // its address for handing batches over as slabs; empty: it sends them in chunks
};

// The workers that a trainer may use: its own ones, and the pool workers assigned by the controller. Confined to the
// I/O thread, once it runs.
class PoolDirectory {
 public:
  // `keys` are the pool's, `own_keys` are for own workers.
  PoolDirectory(const net::KeyRing& keys, std::optional<net::KeyRing> own_keys, std::vector<OwnWorker> own_workers)
      : keys_(keys), own_keys_(std::move(own_keys)), own_workers_(std::move(own_workers)) {}

  void set_roster(std::vector<wire::TrainerRoster::Entry> entries) { pool_workers_ = std::move(entries); }
  void forget_own(uint64_t worker_id) {
    std::erase_if(own_workers_, [&](const OwnWorker& worker) { return worker.worker_id == worker_id; });
  }

  bool is_own(uint64_t worker_id) const {
    return std::any_of(own_workers_.begin(), own_workers_.end(),
                       [&](const OwnWorker& worker) { return worker.worker_id == worker_id; });
  }

  // The trainer's public key for its own workers; nullopt without any.
  std::optional<net::PublicKey> own_key() const {
    return own_keys_ ? std::optional(own_keys_->own().public_key()) : std::nullopt;
  }

  // All workers, own ones first.
  std::vector<wire::RosterEntry> entries() const {
    std::vector<wire::RosterEntry> entries;
    for (const OwnWorker& worker : own_workers_) entries.push_back({.worker_id = worker.worker_id, .incarnation = 1});
    for (const auto& entry : pool_workers_) entries.push_back(entry.worker);
    return entries;
  }

  struct Place {
    // An error if the address that the controller named is not an endpoint, or it named no key.
    Result<net::Endpoint> endpoint;
    const net::KeyRing& keys;
    std::optional<net::PublicKey> key = {};  // the worker's key; nullopt: the key of its role in `keys`
    std::string handover = {};               // see OwnWorker
  };
  std::optional<Place> find(uint64_t worker_id) const {
    for (const OwnWorker& worker : own_workers_)
      if (worker.worker_id == worker_id)
        return Place{.endpoint = worker.endpoint, .keys = *own_keys_, .handover = worker.handover};
    for (const auto& entry : pool_workers_)
      if (entry.worker.worker_id == worker_id)
        return Place{.endpoint = place_of(entry), .keys = keys_, .key = net::PublicKey(entry.key)};
    return std::nullopt;
  }

 private:
  static Result<net::Endpoint> place_of(const wire::TrainerRoster::Entry& entry) {
    if (entry.key == wire::PublicKeyBytes{})
      return Fault{Errc::kMalformed, "the controller provides no key to identify it"};
    return net::Endpoint::parse(entry.endpoint);
  }

  const net::KeyRing& keys_;
  std::optional<net::KeyRing> own_keys_;
  std::vector<OwnWorker> own_workers_;
  std::vector<wire::TrainerRoster::Entry> pool_workers_;
};

// Returns the same text for all ranks of a job that was started by torchrun, or by any other launcher that sets
// MASTER_ADDR and MASTER_PORT, and a different text for any other job that runs at that time. Empty if the environment
// does not describe such a job.
std::string identity_of_launched_job();

// `identity` is the job's, empty for a process without other ranks. A process with loaders of several names is in one
// group for each name.
wire::JobRank job_rank(const std::string& identity, const std::string& job_name, uint32_t rank, uint32_t world_size);

}  // namespace penstock::pool_client
