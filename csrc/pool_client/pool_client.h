// SPDX-License-Identifier: Apache-2.0
#pragma once
// A client whose batches are made by a pool: the calls to its I/O thread that only pools have.

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "loader/client.h"
#include "pool_client/lane_places.h"
#include "pool_client/pool_source.h"

namespace penstock::pool_client {

// Thread-compatible, as Client.
class PoolClient : public loader::Client {
 public:
  // `owned` is `source`.
  PoolClient(const loader::ClientOptions& options, PoolSource& source, std::unique_ptr<loader::BatchSource> owned)
      : loader::Client(options, std::move(owned)), source_(source) {}

  // Sets the plan of the cut in force, which is sent to the controller: JSON for people, of at most
  // wire::kPlanBytesMax.
  void set_plan(const std::string& json, uint64_t change_count) { source_.set_plan(json, change_count); }
  void put_blob(const wire::BlobId& id, std::string bytes) { source_.put_blob(id, std::move(bytes)); }
  void use_blobs(std::vector<wire::BlobId> ids) { source_.use_blobs(std::move(ids)); }
  void set_lanes(std::map<wire::Lane, LanePlaces::Place> places) { source_.set_lanes(std::move(places)); }
  void lose_own_worker(uint64_t worker_id) { source_.lose_own_worker(worker_id); }
  uint32_t open_worker_count() const { return source_.worker_count(); }
  std::string describe_pool() const { return source_.describe(); }
  // Workers whose kernels give different bits than this process's, and the affected kernel families, for people.
  std::map<std::string, std::string> workers_apart() const { return source_.workers_apart(); }
  std::optional<Duration> controller_silence() const { return source_.controller_silence(); }

 private:
  PoolSource& source_;  // owned by the client
};

}  // namespace penstock::pool_client
