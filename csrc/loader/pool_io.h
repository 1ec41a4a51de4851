// SPDX-License-Identifier: Apache-2.0
#pragma once
// The thread that speaks with a pool for a trainer: a socket to the controller, one to each worker, and a clock around
// cluster/pool_session.h. The session decides which worker makes which batch and keeps the requests; this class has
// their bytes, and puts batches together from pieces. Workers come and go below a client that need not know.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/board.h"
#include "base/event_loop.h"
#include "base/live_clock.h"
#include "cluster/link_meter.h"
#include "cluster/pool_session.h"
#include "loader/batch_memory.h"
#include "loader/batch_source.h"
#include "loader/blob_store.h"
#include "loader/controller_link.h"
#include "loader/inbox.h"
#include "loader/incoming_batch.h"
#include "loader/job_meter.h"
#include "loader/kind_comparison.h"
#include "loader/lane_places.h"
#include "loader/pool_answers.h"
#include "loader/pool_directory.h"
#include "loader/pool_standing.h"
#include "loader/stage_chain.h"
#include "loader/trainer_pace.h"
#include "loader/worker_link.h"
#include "loader/worker_links.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "net/ready_set.h"
#include "net/resolver.h"
#include "net/seal.h"
#include "wire/pool_record.h"

namespace penstock::loader {

struct PoolIoOptions {
  std::optional<net::Endpoint> controller;  // none: the trainer's own workers are all that there are
  net::KeyRing keys;
  std::string job;    // its name, for people
  std::string about;  // this process, for people
  uint32_t worker_count_max = 0;
  uint32_t depth = 2;         // requests that a worker may have at once
  uint64_t credit_bytes = 0;  // of each worker
  uint64_t arena_bytes = 0;   // of the memory that batches are received into
  bool is_iterable = false;   // every shard is a lane
  bool allow_pickle = false;  // unpickling runs code, so workers are trusted with this process
  bool is_python = false;     // batches become Python's values
  net::Resolver::Lookup lookup = net::look_up;
  uint8_t ciphers = net::fast_ciphers();  // for the pieces of batches
  // Of the GPU that the program trains on, as NVIDIA's tools show it; empty where there is none.
  std::string gpu_uuid = {};
  wire::JobKind job_kind = wire::JobKind::kPython;
  uint16_t torch = 0;  // that the job is made with, as wire::torch_number()
  // Of a trainer without a dataset of its own: what a worker has said of it, which those of all others must be.
  struct SaidSize {
    uint64_t size = wire::kSizeUntold;
    std::string by{};  // the worker
  };
  SaidSize said_size = {};
  wire::JobRank job_rank = {};
  Numerics numerics = {};  // of this process's kernels; zeros: workers are not compared with it
};

// Confined to the loop's thread, except where a comment says otherwise.
class PoolIo final : public EventLoop::Handler {
 public:
  // What arrives goes through `stages` to `inbox`. They and `options` outlive this.
  PoolIo(const PoolIoOptions& options, const net::RunId& run, PoolDirectory directory, StageChain& stages,
         Inbox& inbox);

  // For any thread.
  BlobStore& blobs() { return blobs_; }
  const PoolStanding& standing() const { return standing_; }
  uint32_t worker_count() const { return worker_count_.load(); }
  LinkStanding link() const { return {.bytes_per_s = link_bytes_per_s_.load(), .round_trip_s = round_trip_s_.load()}; }
  void note_pace(const TrainerPace& pace) { pace_.set(pace); }
  void set_plan(const std::string& json, uint64_t change_count) {
    plan_.set(std::make_shared<const wire::PlanReport>(
        wire::PlanReport{.trainer_id = run_.id, .change_count = change_count, .json = json, .secret = run_.secret}));
  }
  // What the pool's workers have spent so far, as far as they have told.
  wire::JobCosts costs() const { return job_meter_.costs(); }
  void retire_held() {
    memory_.retire_held();
    passed_views_.retire_held();
  }

  // Requests of earlier epochs are forgotten.
  void begin_epoch(uint32_t epoch, std::map<wire::Lane, LanePlaces::Place> lanes);
  void ask(cluster::SharedContent content);
  void recall(const Batch::Origin& origin);
  void forget_recall(const Batch::Origin& origin);
  void lose_own_worker(uint64_t worker_id);

  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;
  void failed(Fault error) override { stages_.fail(0, error); }

 private:
  using BatchKey = wire::BatchKey;

  void take_lookups();
  // What this run goes by with a worker.
  uint64_t run_id_with(uint64_t worker_id) const { return directory_.is_own(worker_id) ? own_workers_run_ : run_.id; }
  // The controller's address, for messages.
  std::string controller_text() const { return options_.controller ? options_.controller->text() : ""; }
  Result<void> connect_to_controller();
  Result<void> serve_controller(Instant now);
  void set_roster(Instant now);
  wire::TrainerReport make_report();
  void tell_plan();

  void note_numerics(uint64_t worker_id, const Numerics& numerics);
  // Has a worker of another kind make the batch as well, if the two were not compared yet.
  void compare_kinds(uint64_t worker_id, const wire::PoolAnswer& answer, const Batch& batch,
                     const cluster::SharedContent& content, Instant now);
  void note_compared(uint64_t worker_id, const Batch& batch);
  void connect(uint64_t worker_id);
  void connect_again(Instant now);
  void serve_workers(Instant now);
  void serve_worker(uint64_t worker_id, Instant now);
  void receive_from(uint64_t worker_id, size_t message_count_max, Instant now);
  void take_event(uint64_t worker_id, WorkerLink& link, const net::ConnectionEvent& event, Instant now);
  void take_message(uint64_t worker_id, WorkerLink& link, std::span<net::ReceivedPart> parts, Instant now);
  // The message in `part`, or its place behind those that wait.
  void take_answer(uint64_t worker_id, WorkerLink& link, net::ReceivedPart part, Instant now);
  void take_answer_in_turn(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, Instant now);
  Result<std::unique_ptr<Batch>> read_answer(uint64_t worker_id, const wire::PoolAnswer& answer, wire::Lane lane,
                                             std::optional<IncomingBatch> whole);
  bool has_other_dataset(const wire::PoolAnswer& answer) const;
  // Whether the request names leaves that stay with its worker.
  bool may_withhold(BatchKey key) const;
  std::unique_ptr<Batch> error_of_dataset(const wire::PoolAnswer& answer, const std::string& place) const;
  void take_waiting(uint64_t worker_id, Instant now);
  bool waits_for_pieces(WorkerLink& link, const wire::PoolAnswer& answer) const;
  void begin_link(uint64_t worker_id, uint32_t number, wire::SealOffer& offer);
  void connect_handover(uint64_t worker_id, WorkerLink& link, uint32_t number);
  // The batch in the slab that an own worker names.
  Result<IncomingBatch> take_slab(WorkerLink& link, const wire::PoolAnswer& answer);
  void connect_data(uint64_t worker_id, WorkerLink& link, const wire::SealGrant& grant, Instant now);
  void serve_data(uint64_t worker_id, Instant now);
  void receive_pieces(uint64_t worker_id, size_t piece_count_max, Instant now);
  void lose_track(uint64_t worker_id, uint32_t number, Instant now);
  // A worker's id, and its endpoint while there is a link, by which a user can find it.
  std::string spoken_place(uint64_t worker_id) const;
  // What to do about a worker whose answers are wrong, behind the news of that. Empty for one of the trainer's own.
  std::string spoken_remedy(uint64_t worker_id) const;
  // Takes in how long a message or a batch was on its way.
  void note_message(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer);
  // Takes in what a batch has cost its worker.
  void note_made(uint64_t worker_id, wire::PoolAnswer answer, const cluster::RequestContent* content);
  void note_crossing(uint64_t worker_id, const wire::PoolAnswer& answer, bool is_narrow, Instant now);
  void note_refusal(uint64_t worker_id, const wire::PoolAnswer& answer);
  void note_declines(const wire::TrainerRoster& roster);
  void tell_of_decline(const std::string& worker, const std::string& reason);

  void carry_out();
  void disconnect(const cluster::PoolSession::Command& command);
  void send(const cluster::PoolSession::Command& command);
  void deliver(BatchKey key, std::unique_ptr<Batch> batch, std::optional<NarrowArrival> narrow = {});
  void end_lane(BatchKey key, wire::Lane lane, Instant now);
  // Nothing was asked for since a while, so that workers would wait here for nothing.
  bool is_idle(Instant now) const;
  // Its program does something else than to train.
  bool is_paused(const TrainerPace& pace, Instant now) const;
  void note_standing(Instant now);
  std::string deaths_of_last_workers() const;
  void note_controller(Instant now, size_t open_count);
  static std::string spoken_silence(WorkerLink& link);
  static std::string spoken_missing_data(WorkerLink& link);
  void complain(uint64_t worker_id, WorkerLink& link, const std::string& what);
  void refuse_message(uint64_t worker_id, WorkerLink& link, const std::string& what, Instant now);
  void note_distrust(const cluster::PoolSession::Command& command);
  void note_death(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, bool is_awaited);
  DeathTraces traces_of(BatchKey key) const;
  // The error in place of a batch that workers died of, or did not answer with.
  std::unique_ptr<Batch> error_in_place(const cluster::PoolSession::Command& command);
  void tell(std::string news);

  const PoolIoOptions& options_;
  const net::RunId run_;
  uint64_t own_workers_run_ = 0;  // what this run goes by with its own workers, to which it may show another key
  StageChain& stages_;
  Inbox& inbox_;

  std::atomic<uint32_t> worker_count_{0};
  Board<TrainerPace> pace_;
  Board<std::shared_ptr<const wire::PlanReport>> plan_;  // shared with the trainer's thread; null before the first
  std::shared_ptr<const wire::PlanReport> plan_told_;
  uint32_t reports_since_plan_ = 0;
  std::atomic<double> link_bytes_per_s_{0};
  std::atomic<double> round_trip_s_{0};
  BlobStore blobs_;
  BatchMemory memory_;
  ArenaViews passed_views_;  // of own workers
  PoolStanding standing_{options_.job_kind};

  std::unique_ptr<net::SocketContext> context_;
  std::unique_ptr<net::ReadySet> ready_set_;
  uint64_t wake_tag_ = 0;  // 0: the loop's descriptor is not in the set yet
  std::unique_ptr<net::Resolver> resolver_;
  uint64_t resolver_tag_ = 0;
  std::unique_ptr<ControllerLink> controller_;
  uint64_t controller_tag_ = 0;
  bool is_controller_ready_ = false;
  PoolDirectory directory_;
  std::unique_ptr<WorkerLinks> links_;
  KindComparison kinds_;
  std::map<uint64_t, Instant> connect_again_at_;  // workers for whom no socket could be opened
  cluster::PoolSession session_;
  uint64_t opened_bytes_ = 0;  // of pieces, in this turn
  uint64_t last_opened_ = 0;   // the worker whose pieces were opened last

  // What workers have spent on batches that counted.
  struct Made {
    uint64_t batch_count = 0;
    uint64_t bytes = 0;  // on the link
    Duration time{};
    Duration cpu_time{};
  };
  Made made_;
  JobMeter job_meter_;

  cluster::LinkMeter link_meter_;
  Instant link_told_at_{};

  uint32_t epoch_ = 0;
  LanePlaces lanes_;
  std::set<wire::Lane> ended_lanes_;
  Instant answered_at_ = clock_now();  // the last time that something was

  // By unanswered request: the last worker that answered it wrongly, how, and what to do about it.
  struct WrongAnswer {
    std::string place;
    std::string reason;
  };
  std::map<BatchKey, WrongAnswer> wrong_answers_;
  // By unanswered request: how the process ended of the last worker that told that it had died of it.
  std::map<BatchKey, std::string> told_ends_;

  bool is_silence_told_ = false;
  bool was_served_ = false;    // some worker has answered a request
  bool is_hopeless_ = false;   // every worker of the pool has declined this trainer
  std::string lost_at_;        // the endpoint of the worker whose connection, or whose process, was lost last
  Instant silent_links_at_{};  // when they are looked for
};

}  // namespace penstock::loader
