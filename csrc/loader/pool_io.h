// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's I/O thread towards a pool: a socket to the controller, one to each worker, and a clock around
// cluster/pool_session.h. Which worker makes what is decided there; here are the bytes of requests, and batches that
// are put together from pieces. Workers come and go below a client that need not know.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bounded_queue.h"
#include "base/file_descriptor.h"
#include "base/live_clock.h"
#include "cluster/pool_session.h"
#include "loader/batch_memory.h"
#include "loader/batch_source.h"
#include "loader/blob_shelf.h"
#include "loader/controller_link.h"
#include "loader/incoming_batch.h"
#include "loader/lane_places.h"
#include "loader/pool_standing.h"
#include "loader/worker_link.h"
#include "loader/worker_links.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "net/ready_set.h"
#include "wire/pool_record.h"

namespace penstock::loader {

struct PoolIoOptions {
  net::Endpoint controller;
  net::KeyRing keys;
  std::string job;    // its name, for people
  std::string about;  // this process, for people
  uint32_t worker_count_max = 0;
  uint32_t depth = 2;         // requests that a worker may have at once
  uint64_t credit_bytes = 0;  // of each worker
  uint64_t arena_bytes = 0;   // of the memory that batches are received into
  bool is_iterable = false;   // every shard is a lane
  bool allow_pickle = false;  // workers are trusted with what unpickling them can do
};

// A worker that this trainer has started itself, beside the pool's.
struct OwnWorker {
  uint64_t worker_id = 0;
  net::Endpoint endpoint;
};

// Thread-compatible as BatchSource; describe() is thread-safe.
class PoolIo : public BatchSource {
 public:
  // `own_keys` are those that own workers go by.
  PoolIo(PoolIoOptions options, uint64_t trainer_id, std::optional<net::KeyRing> own_keys,
         std::vector<OwnWorker> own_workers);
  ~PoolIo() override;

  // What requests are made with from now on: the job, and the prefixes in their order. Each has been put on the shelf.
  void use_blobs(std::vector<wire::BlobId> ids);
  BlobShelf& shelf() { return shelf_; }
  // Where the lanes of the epoch that is announced next begin, if not at their beginning.
  void set_lanes(std::map<wire::Lane, LanePlaces::Place> places);

  // One of this trainer's own workers is gone for good.
  void lose_own_worker(uint64_t worker_id);

  // How things stand with the controller and the workers, in a sentence or two. Before the controller has answered its
  // name is looked up, which can block.
  std::string describe() const;
  // As PoolStanding::controller_silence.
  std::optional<Duration> controller_silence() const { return standing_.controller_silence(); }

  Result<void> start(std::unique_ptr<BatchStage> stage) override;
  void stop() override;
  void fetch(const wire::Request& request, std::span<const std::byte> body) override;
  void announce(const wire::Request& request, std::span<const std::byte> body) override;
  void dismiss(uint32_t) override {}
  uint32_t worker_of(uint32_t) const override { return 0; }
  uint32_t worker_count() const override { return worker_count_.load(); }
  bool has_bounded_memory() const override { return false; }
  void note_ready(uint32_t count) override { ready_count_.store(count); }
  void finish(Batch& batch) override;
  void retire_held() override { memory_.retire_held(); }

 private:
  using BatchKey = wire::BatchKey;
  struct Asked {
    wire::IndexKind index_kind;
    std::vector<std::byte> indices;
    uint64_t epoch_seed;
    wire::Lane lane;
    std::shared_ptr<const std::vector<wire::BlobId>> blobs;  // shared by the requests of a time
  };

  void run_to_the_end(const std::stop_token& stop);
  void run(const std::stop_token& stop);
  Result<void> begin();
  void part();
  void post(std::function<void()> action);
  void wake();
  Result<void> wait(const std::stop_token& stop);

  Result<void> serve_controller(Instant now);
  void set_roster(Instant now);
  wire::TrainerReport make_report();

  void connect(uint64_t worker_id);
  void connect_again(Instant now);
  void serve_worker(uint64_t worker_id, Instant now);
  void receive_from(uint64_t worker_id, size_t message_count_max, Instant now);
  void take_event(uint64_t worker_id, WorkerLink& link, const net::ConnectionEvent& event, Instant now);
  void take_message(uint64_t worker_id, WorkerLink& link, std::span<net::ReceivedPart> parts, Instant now);
  void take_answer(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer,
                   std::span<const std::byte> piece, Instant now);
  std::unique_ptr<Batch> make_batch(uint64_t worker_id, const wire::PoolAnswer& answer,
                                    std::optional<IncomingBatch> whole);
  // A worker's id, and its endpoint while there is a link: what a user can find it by.
  std::string spoken_place(uint64_t worker_id) const;
  void note_refusal(uint64_t worker_id, const wire::PoolAnswer& answer);
  void note_unfitness(uint32_t pool_count, uint32_t unfit_count);

  void carry_out();
  void send(const cluster::PoolSession::Command& command);
  void fail_batch(BatchKey key, uint32_t death_count);
  void deliver(BatchKey key, std::unique_ptr<Batch> batch);
  void end_lane(BatchKey key, wire::Lane lane, Instant now);
  void begin_epoch(uint32_t epoch, std::vector<std::byte> seeds);
  void ask(BatchKey key, Asked asked);
  // Nothing was asked for since a while, so that workers would wait here for nothing.
  bool is_idle(Instant now) const;
  void note_standing(Instant now);
  void tell(std::string news);

  const PoolIoOptions options_;
  const uint64_t trainer_id_;
  const std::optional<net::KeyRing> own_keys_;
  std::vector<OwnWorker> own_workers_;  // used by the I/O thread alone, once it runs

  FileDescriptor wake_fd_;
  std::atomic<bool> is_awake_{true};
  std::atomic<uint32_t> worker_count_{0};
  std::atomic<uint32_t> ready_count_{0};
  BoundedQueue<std::function<void()>> actions_;  // carried out by the I/O thread
  BlobShelf shelf_;
  BatchMemory memory_;
  std::shared_ptr<const std::vector<wire::BlobId>> blobs_;  // used by the trainer's thread alone
  std::map<wire::Lane, LanePlaces::Place> next_lanes_;      // the same

  // From here on used by the I/O thread alone, once it runs.
  std::unique_ptr<BatchStage> stage_;
  std::unique_ptr<net::SocketContext> context_;
  std::unique_ptr<net::ReadySet> ready_set_;
  uint64_t wake_tag_ = 0;
  std::unique_ptr<ControllerLink> controller_;
  uint64_t controller_tag_ = 0;
  bool is_controller_ready_ = false;
  std::unique_ptr<WorkerLinks> links_;
  cluster::PoolSession session_;
  std::vector<wire::TrainerRoster::Entry> pool_workers_;  // on the roster
  std::map<uint64_t, Instant> connect_again_at_;          // workers for whom no socket could be opened
  std::map<BatchKey, Asked> asked_;
  Instant answered_at_ = clock_now();  // the last time that something was
  uint32_t epoch_ = 0;
  std::vector<std::byte> seeds_;  // of the epoch
  LanePlaces lanes_;
  std::set<wire::Lane> ended_lanes_;
  bool is_silence_told_ = false;
  bool was_served_ = false;   // some worker has answered a request
  bool is_hopeless_ = false;  // every worker of the pool has declined this trainer
  std::string lost_at_;       // the endpoint of the worker whose connection was lost last

  Instant silent_links_at_{};  // when they are looked for

  PoolStanding standing_;
  std::jthread thread_;  // named pk_pool_io
};

}  // namespace penstock::loader
