// SPDX-License-Identifier: Apache-2.0
#pragma once
// A client whose batches come from a pool: what there is to say to its I/O thread beside what every client says.

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "loader/client.h"
#include "loader/lane_places.h"
#include "loader/pool_io.h"

namespace penstock::loader {

// Thread-compatible, as Client.
class PoolClient : public Client {
 public:
  // `source` is `io`.
  PoolClient(const ClientOptions& options, PoolIo& io, std::unique_ptr<BatchSource> source)
      : Client(options, std::move(source)), io_(io) {}

  void put_blob(const wire::BlobId& id, std::string bytes) { io_.shelf().put(id, std::move(bytes)); }
  void use_blobs(std::vector<wire::BlobId> ids) { io_.use_blobs(std::move(ids)); }
  void set_lanes(std::map<wire::Lane, LanePlaces::Place> places) { io_.set_lanes(std::move(places)); }
  void lose_own_worker(uint64_t worker_id) { io_.lose_own_worker(worker_id); }
  uint32_t open_worker_count() const { return io_.worker_count(); }
  std::string describe_pool() const { return io_.describe(); }
  std::optional<Duration> controller_silence() const { return io_.controller_silence(); }

 private:
  PoolIo& io_;  // owned by the client
};

}  // namespace penstock::loader
