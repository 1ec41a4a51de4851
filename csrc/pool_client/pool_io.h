// SPDX-License-Identifier: Apache-2.0
#pragma once
// The thread that communicates with a pool for a trainer: a socket to the controller, one to each worker, and a clock
// around session/pool_session.h. The session decides which worker makes which batch and keeps the requests; this class
// holds their bytes, and assembles batches from chunks. Changes of the workers are invisible to the client above.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/mutex.h"
#include "loader/batch_memory.h"
#include "loader/batch_source.h"
#include "loader/inbox.h"
#include "loader/incoming_batch.h"
#include "loader/stage_chain.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "net/seal.h"
#include "net/socket.h"
#include "pool_client/blob_store.h"
#include "pool_client/controller_link.h"
#include "pool_client/job_meter.h"
#include "pool_client/kind_comparison.h"
#include "pool_client/pool_directory.h"
#include "pool_client/worker_links.h"
#include "session/link_meter.h"
#include "session/pool_session.h"
#include "wire/pool_record.h"

namespace penstock::pool_client {

struct PoolIoOptions {
  std::optional<net::Endpoint> controller;  // nullopt: there are only own workers
  net::KeyRing keys;
  std::string job;    // the job's name, for people
  std::string about;  // describes this process, for people
  uint32_t worker_count_max = 0;
  uint32_t depth = 2;         // maximum outstanding requests per worker
  uint64_t credit_bytes = 0;  // of each worker
  uint64_t arena_bytes = 0;   // size of the memory for received batches
  bool is_iterable = false;   // every shard is a lane
  bool allow_pickle = false;  // unpickling runs code, so this trusts workers with this process
  bool is_python = false;     // batches are converted to Python values
  net::Resolver::Lookup lookup = net::look_up;
  uint8_t ciphers = net::fast_ciphers();  // for the chunks of batches
  // Of the GPU that the program trains on, as NVIDIA's tools show it; empty without one.
  std::string gpu_uuid = {};
  wire::JobKind job_kind = wire::JobKind::kPython;
  uint16_t torch = 0;  // the version that the job is made with, as wire::torch_number()
  // For a trainer without a dataset: the dataset's size as reported by one worker; all others must report the same.
  struct ReportedSize {
    uint64_t size = wire::kSizeUnknown;
    std::string by{};  // the worker
  };
  ReportedSize reported_size = {};
  wire::JobRank job_rank = {};
  Numerics numerics = {};  // of this process's kernels; zeros: workers are not compared with it
};

// Confined to the loop's thread, except where a comment states otherwise.
class PoolIo final : public EventLoop::Handler {
 public:
  // Arrivals pass through `stages` to `inbox`. Both, and `options`, outlive this.
  PoolIo(const PoolIoOptions& options, const net::RunId& run, PoolDirectory directory, loader::StageChain& stages,
         loader::Inbox& inbox);

  // The calls up to retire_held() are for any thread.
  BlobStore& blobs() { return blobs_; }
  const PoolStanding& standing() const { return standing_; }
  uint32_t worker_count() const { return worker_count_.load(); }
  loader::LinkStanding link() const {
    return {.bytes_per_s = link_bytes_per_s_.load(), .round_trip_s = round_trip_s_.load()};
  }
  void note_pace(const loader::TrainerPace& pace) { pace_.set(pace); }
  void set_plan(const std::string& json, uint64_t change_count) {
    plan_.set(std::make_shared<const wire::PlanReport>(
        wire::PlanReport{.trainer_id = run_.id, .change_count = change_count, .json = json, .secret = run_.secret}));
  }
  // The resources that the pool's workers have spent so far, according to their reports.
  wire::JobCosts costs() const { return job_meter_.costs(); }
  void retire_held() {
    memory_.retire_held();
    passed_views_.retire_held();
  }

  // Forgets requests of earlier epochs.
  void begin_epoch(uint32_t epoch, std::map<wire::Lane, LanePlaces::Place> lanes);
  void ask(session::SharedContent content);
  void recall(const loader::Batch::Origin& origin);
  void forget_recall(const loader::Batch::Origin& origin);
  void lose_own_worker(uint64_t worker_id);

  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;
  void failed(Fault error) override { stages_.fail(0, error); }

 private:
  using BatchKey = wire::BatchKey;

  void take_lookups();
  // The id of this run for a worker.
  uint64_t run_id_with(uint64_t worker_id) const { return directory_.is_own(worker_id) ? own_workers_run_ : run_.id; }
  // The controller's address, for messages.
  std::string controller_text() const { return options_.controller ? options_.controller->text() : ""; }
  Result<void> connect_to_controller();
  Result<void> serve_controller(Instant now);
  void set_roster(Instant now);
  wire::TrainerReport make_report();
  void send_plan();

  void note_numerics(uint64_t worker_id, const Numerics& numerics);
  // Requests the batch from a worker of another kind as well, if the two kinds were not compared yet.
  void compare_kinds(uint64_t worker_id, const wire::PoolAnswer& answer, const loader::Batch& batch,
                     const session::SharedContent& content, Instant now);
  void note_compared(uint64_t worker_id, const loader::Batch& batch);
  void connect(uint64_t worker_id);
  void connect_again(Instant now);
  void serve_workers(Instant now);
  void serve_worker(uint64_t worker_id, Instant now);
  void receive_from(uint64_t worker_id, size_t message_count_max, Instant now);
  void take_event(uint64_t worker_id, WorkerLink& link, const net::ConnectionEvent& event, Instant now);
  void take_message(uint64_t worker_id, WorkerLink& link, std::span<net::ReceivedPart> parts, Instant now);
  // Takes the message in `part`, or appends it to the waiting messages.
  void take_answer(uint64_t worker_id, WorkerLink& link, net::ReceivedPart part, Instant now);
  void take_answer_in_turn(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, Instant now);
  Result<std::unique_ptr<loader::Batch>> read_answer(uint64_t worker_id, const wire::PoolAnswer& answer,
                                                     wire::Lane lane, std::optional<loader::IncomingBatch> whole);
  bool has_other_dataset(const wire::PoolAnswer& answer) const;
  // Whether the request names leaves to withhold.
  bool may_withhold(BatchKey key) const;
  std::unique_ptr<loader::Batch> error_of_dataset(const wire::PoolAnswer& answer, const std::string& place) const;
  void take_waiting(uint64_t worker_id, Instant now);
  bool waits_for_pieces(WorkerLink& link, const wire::PoolAnswer& answer) const;
  void begin_link(uint64_t worker_id, uint32_t number, wire::SealOffer& offer);
  void connect_handover(uint64_t worker_id, WorkerLink& link, uint32_t number);
  // The batch in the slab that an own worker names.
  Result<loader::IncomingBatch> take_slab(WorkerLink& link, const wire::PoolAnswer& answer);
  void connect_data(uint64_t worker_id, WorkerLink& link, const wire::SealGrant& grant, Instant now);
  void serve_data(uint64_t worker_id, Instant now);
  void receive_pieces(uint64_t worker_id, size_t piece_count_max, Instant now);
  void lose_track(uint64_t worker_id, uint32_t number, Instant now);
  // A worker's id, and its endpoint while there is a link, so that a user can find it.
  std::string format_place(uint64_t worker_id) const;
  // Advice about a worker whose answers are wrong, to append to the news about it. Empty for an own worker.
  std::string format_hint(uint64_t worker_id) const;
  // Records the transfer time of a message or a batch.
  void note_message(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer);
  // Records the resources that a worker spent on a batch.
  void note_made(uint64_t worker_id, wire::PoolAnswer answer, const session::RequestContent* content);
  void note_crossing(uint64_t worker_id, const wire::PoolAnswer& answer, bool is_narrow, Instant now);
  void note_refusal(uint64_t worker_id, const wire::PoolAnswer& answer);
  void note_declines(const wire::TrainerRoster& roster);
  void warn_of_decline(const std::string& worker, const std::string& reason);

  void carry_out();
  void disconnect(const session::PoolSession::Command& command);
  void send(const session::PoolSession::Command& command);
  void deliver(BatchKey key, std::unique_ptr<loader::Batch> batch, std::optional<loader::NarrowArrival> narrow = {});
  void end_lane(BatchKey key, wire::Lane lane, Instant now);
  // Whether there were no requests for a while, so that workers would be idle.
  bool is_idle(Instant now) const;
  // Whether the program is not training.
  bool is_paused(const loader::TrainerPace& pace, Instant now) const;
  void note_standing(Instant now);
  std::string deaths_of_last_workers() const;
  void note_controller(Instant now, size_t open_count);
  static std::string describe_unresponsive(WorkerLink& link);
  static std::string describe_missing_data(WorkerLink& link);
  void complain(uint64_t worker_id, WorkerLink& link, const std::string& what);
  void refuse_message(uint64_t worker_id, WorkerLink& link, const std::string& what, Instant now);
  void note_distrust(const session::PoolSession::Command& command);
  void note_death(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, bool is_awaited);
  loader::DeathTraces traces_of(BatchKey key) const;
  // The error in place of a batch that workers died of, or answered wrongly.
  std::unique_ptr<loader::Batch> error_in_place(const session::PoolSession::Command& command);
  void tell(std::string news);

  const PoolIoOptions& options_;
  const net::RunId run_;
  uint64_t own_workers_run_ = 0;  // this run's id for its own workers, which may see a different key
  loader::StageChain& stages_;
  loader::Inbox& inbox_;

  std::atomic<uint32_t> worker_count_{0};
  Board<loader::TrainerPace> pace_;
  Board<std::shared_ptr<const wire::PlanReport>> plan_;  // shared with the trainer's thread; null before the first
  std::shared_ptr<const wire::PlanReport> reported_plan_;
  uint32_t reports_since_plan_ = 0;
  std::atomic<double> link_bytes_per_s_{0};
  std::atomic<double> round_trip_s_{0};
  BlobStore blobs_;
  loader::BatchMemory memory_;
  loader::ArenaViews passed_views_;  // of own workers
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
  std::map<uint64_t, Instant> connect_again_at_;  // workers for which no socket could be opened
  session::PoolSession session_;
  uint64_t opened_bytes_ = 0;  // of chunks, in this turn
  uint64_t last_opened_ = 0;   // the worker whose chunks were decrypted last

  // The resources that workers have spent on accepted batches.
  struct Made {
    uint64_t batch_count = 0;
    uint64_t bytes = 0;  // on the link
    Duration time{};
    Duration cpu_time{};
  };
  Made made_;
  JobMeter job_meter_;

  session::LinkMeter link_meter_;
  Instant link_rate_updated_at_{};

  uint32_t epoch_ = 0;
  LanePlaces lanes_;
  std::set<wire::Lane> ended_lanes_;
  Instant answered_at_ = clock_now();  // the time of the last answer

  // By unanswered request: the last worker that answered it wrongly, the fault, and the advice.
  struct WrongAnswer {
    std::string place;
    std::string reason;
  };
  std::map<BatchKey, WrongAnswer> wrong_answers_;
  // By unanswered request: how the process ended, as reported by the last worker whose process died of the request.
  std::map<BatchKey, std::string> reported_ends_;

  bool is_unresponsive_logged_ = false;
  bool was_served_ = false;    // a worker has answered a request
  bool is_hopeless_ = false;   // every worker of the pool has declined this trainer
  std::string lost_at_;        // the endpoint of the last worker whose connection, or whose process, was lost
  Instant silent_links_at_{};  // the next check for silent workers
};

}  // namespace penstock::pool_client
