// SPDX-License-Identifier: Apache-2.0
#pragma once
// Batches of a pool's workers, for the trainer's thread. Every call is forwarded to the thread that communicates with
// the pool (pool_io.h).

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "loader/batch_source.h"
#include "pool_client/lane_places.h"
#include "pool_client/pool_io.h"

namespace penstock::pool_client {

// Thread-compatible as BatchSource; describe() and workers_apart() are thread-safe.
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
  // See PoolStanding::controller_silence.
  std::optional<Duration> controller_silence() const { return io_.standing().controller_silence(); }

  Result<void> start(loader::Stages stages) override;
  void stop() override;
  void fetch(const std::shared_ptr<session::RequestContent>& content) override;
  void recall(const loader::Batch::Origin& origin) override;
  void forget_recall(const loader::Batch::Origin& origin) override;
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

}  // namespace penstock::pool_client
