// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a trainer finds the workers that it may use: its own ones, and those of the pool that the controller has given
// it.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "wire/reports.h"

namespace penstock::loader {

// A worker that a trainer has started itself, beside the pool's.
struct OwnWorker {
  uint64_t worker_id = 0;
  net::Endpoint endpoint;
  std::string handover = {};  // where it listens to hand batches over as slabs; empty: it sends them in pieces
};

// Confined to the I/O thread, once it runs.
class PoolDirectory {
 public:
  // `keys` are the pool's, `own_keys` those that own workers go by.
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

  // The public key that this trainer shows to its own workers; none without any.
  std::optional<net::PublicKey> own_key() const {
    return own_keys_ ? std::optional(own_keys_->own().public_key()) : std::nullopt;
  }

  // All of them.
  std::vector<wire::RosterEntry> entries() const {
    std::vector<wire::RosterEntry> entries;
    for (const OwnWorker& worker : own_workers_) entries.push_back({.worker_id = worker.worker_id, .incarnation = 1});
    for (const auto& entry : pool_workers_) entries.push_back(entry.worker);
    return entries;
  }

  struct Place {
    // An error if the controller named an address that is no endpoint, or no key.
    Result<net::Endpoint> endpoint;
    const net::KeyRing& keys;
    std::optional<net::PublicKey> key = {};  // by which the worker is known; none: that of its role in `keys`
    std::string handover = {};               // as OwnWorker's
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
      return Fault{Errc::kMalformed, "the controller names no key by which to know it"};
    return net::Endpoint::parse(entry.endpoint);
  }

  const net::KeyRing& keys_;
  std::optional<net::KeyRing> own_keys_;
  std::vector<OwnWorker> own_workers_;
  std::vector<wire::TrainerRoster::Entry> pool_workers_;
};

}  // namespace penstock::loader
