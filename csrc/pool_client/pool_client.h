// SPDX-License-Identifier: Apache-2.0
#pragma once
// A client whose batches are made by a pool (PoolClient): the calls to its I/O thread that only pools have. They are
// forwarded to its batch source (PoolSource), and from there to the I/O thread.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "loader/batch_source.h"
#include "loader/client.h"
#include "pool_client/blob_store.h"
#include "pool_client/pool_io.h"

namespace penstock::pool_client {

// Batches of a pool's workers, for the trainer's thread. Every call is forwarded to the thread that communicates with
// the pool (pool_io.h). Thread-compatible as BatchSource; describe() and workers_apart() are thread-safe.
class PoolSource : public loader::BatchSource {
 public:
  // `run` belongs to the key of `options.keys`. `own_keys` are for own workers.
  PoolSource(PoolIoOptions options, const net::RunId& run, std::optional<net::KeyRing> own_keys,
             std::vector<OwnWorker> own_workers);
  ~PoolSource() override;

  void put_blob(const wire::BlobId& id, std::string bytes) { io_.blobs().put(id, std::move(bytes)); }
  // Sets the blobs for all further requests: the job, and the prefixes in order. Each must have been put. A prefix that
  // no request refers to any more is dropped.
  void use_blobs(std::vector<wire::BlobId> ids) { named_ = io_.blobs().name(std::move(ids)); }
  // Sets the positions at which lanes of the next announced epoch start, if not at their first batch.
  void set_lanes(std::map<wire::Lane, LanePlaces::Place> places) { next_lanes_ = std::move(places); }
  // Drops an own worker that is permanently gone.
  void lose_own_worker(uint64_t worker_id);

  // The state of the controller and the workers, in a sentence or two.
  std::string describe() const;
  std::map<std::string, std::string> workers_apart() const { return io_.standing().workers_apart(); }
  // See PoolStanding::time_since_controller.
  std::optional<Duration> time_since_controller() const { return io_.standing().time_since_controller(); }

  Result<void> start(loader::Stages stages) override;
  void stop() override;
  void fetch(const std::shared_ptr<session::RequestContent>& content) override;
  void recall(const loader::BatchRecord::Origin& origin) override;
  void forget_recall(const loader::BatchRecord::Origin& origin) override;
  void announce(const wire::ToJob& message) override;
  void dismiss(uint32_t) override {}
  uint32_t worker_of(uint32_t) const override { return 0; }
  uint32_t worker_count() const override { return io_.worker_count(); }
  std::optional<loader::LinkStanding> link() const override { return io_.link(); }
  wire::JobCosts costs() const override { return io_.costs(); }
  bool has_bounded_memory() const override { return false; }
  void note_pace(const loader::TrainerPace& pace) override { io_.note_pace(pace); }
  void set_plan(const std::string& json, uint64_t change_count) { io_.set_plan(json, change_count); }
  void retire_held() override {
    io_.retire_held();
    stages_.retire_held();
  }

 private:
  const PoolIoOptions options_;
  BlobStore::Ids named_;
  std::shared_ptr<const std::vector<std::byte>> seeds_ =
      std::make_shared<std::vector<std::byte>>();  // of the epoch; shared with its requests
  std::map<wire::Lane, LanePlaces::Place> next_lanes_;
  PoolIo io_;
  EventLoop loop_;
};

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
  std::optional<Duration> time_since_controller() const { return source_.time_since_controller(); }

 private:
  PoolSource& source_;  // owned by the client
};

}  // namespace penstock::pool_client
