// SPDX-License-Identifier: Apache-2.0
#pragma once
// The shells of the simulated pool: as thin as the live ones are to be, around the same state machines.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/maker.h"
#include "world.h"

namespace penstock::sim {

class SimController : public Process {
 public:
  SimController(World& world, ProcessId id);
  void receive(ProcessId from, const Message& message) override;
  void tick() override;
  std::optional<Instant> next_tick() const override { return roster_.next_tick(); }
  std::string name() const override { return "controller"; }

  bool drain(uint64_t worker_id);
  void left(uint64_t worker_id);
  const scheduling::Roster& roster() const { return roster_; }

 private:
  void push();
  void push_orders();

  scheduling::Roster roster_;
};

// A trainer that no controller knows. It greets every worker, and stays with each that lets it in.
class SimIntruder : public Process {
 public:
  SimIntruder(World& world, ProcessId id, uint64_t trainer_id) : Process(world, id), trainer_id_(trainer_id) {}
  void receive(ProcessId from, const Message& message) override;
  void tick() override;
  std::optional<Instant> next_tick() const override { return due_at_; }
  std::string name() const override { return "intruder " + std::to_string(trainer_id_); }

 private:
  struct Link {
    uint32_t number = 0;
    uint64_t stamp = 0;
    bool is_open = false;
  };

  const uint64_t trainer_id_;
  Instant due_at_{};
  uint32_t link_count_ = 0;
  std::map<uint64_t, Link> links_;  // by worker
};

class SimWorker : public Process {
 public:
  // `declined_jobs`: those that it declines, by their bits.
  SimWorker(World& world, ProcessId id, uint64_t worker_id, uint32_t declined_jobs);
  void receive(ProcessId from, const Message& message) override;
  void tick() override;
  std::optional<Instant> next_tick() const override;
  std::string name() const override { return "worker " + std::to_string(enrolment_.worker_id()); }

  uint64_t worker_id() const { return enrolment_.worker_id(); }
  uint32_t declined_jobs() const { return declined_jobs_; }
  session::WorkerSession& session() { return session_; }
  const session::WorkerSession& session() const { return session_; }
  void drain();
  // The process in which it makes its batches ends, and another one takes its place.
  void lose_process();
  // Whether it is at a batch that it will never end.
  bool is_hung() const { return work_ && work_->is_endless; }
  // Whether it can make batches of this job, now or soon.
  bool can_make(uint32_t job) const {
    return !is_hung() && !session_.is_draining() && (declined_jobs_ >> job & 1) == 0;
  }
  // The trainer and the key of the batch that it makes now.
  std::optional<std::pair<uint64_t, BatchKey>> work() const;
  // For how long it may be at a batch that nobody wants, as people are told.
  Duration grace_for_abandoned() const;
  Duration stuck_after() const;
  // The job and the key of the batch that it makes now.
  std::optional<std::pair<uint32_t, BatchKey>> working_on() const;
  uint32_t job() const { return job_; }
  std::vector<BatchKey> kept() const;

 private:
  struct Work {
    session::WorkerSession::Request request;
    Content content;
    uint64_t trainer_id = 0;
    Instant begun_at{};
    bool is_endless = false;
    bool is_ending = false;  // with its process, which was killed
  };

  void carry_out();
  void begin();
  void finish(uint64_t work_number);
  // Looks whether its process, or itself, is at what may never end.
  void look();
  void end_work();
  // Work that nobody can want any more.
  void give_up_work();
  Content make(const session::WorkerSession::Request& request);

  const uint32_t declined_jobs_;
  bool was_open_ = false;  // it had heard nothing of a controller for so long that it took whoever came
  session::WorkerSession session_;
  session::WorkerEnrolment enrolment_;
  uint64_t trainer_id_ = 0;  // whose dataset is loaded
  uint32_t job_ = 0;
  std::map<BatchKey, uint64_t> lane_starts_;                   // that came with requests
  std::map<std::pair<uint32_t, wire::Lane>, uint64_t> lanes_;  // the next position
  std::map<BatchKey, Content> made_;
  std::optional<Work> work_;
  uint64_t work_number_ = 0;
  uint64_t tenancy_ = 0;       // counts the welcomes that know nothing
  uint64_t work_tenancy_ = 0;  // of the work that was begun last
  server::MakerWatch watch_;
  std::optional<Duration> longest_;  // of the batches of that tenancy
  Instant checked_at_{};
  std::optional<Instant> drained_at_;
  bool is_closing_ = false;
};

class SimTrainer : public Process {
 public:
  // Goes on from where `resumed_from` was, if there is such a one.
  SimTrainer(World& world, ProcessId id, uint64_t trainer_id, uint32_t job, const SimTrainer* resumed_from);
  void receive(ProcessId from, const Message& message) override;
  void tick() override;
  std::optional<Instant> next_tick() const override;
  std::string name() const override { return "trainer " + std::to_string(trainer_id_); }

  void begin();
  void worker_died(uint64_t worker_id);
  bool is_done() const { return is_done_; }
  bool is_recalling() const { return recalled_.has_value(); }
  uint32_t job() const { return job_; }
  uint64_t trainer_id() const { return trainer_id_; }
  const session::PoolSession& session() const { return session_; }

 private:
  // The content of a checkpoint.
  struct Progress {
    uint32_t epoch = 0;
    uint64_t delivered_count = 0;
    std::vector<uint64_t> shard_positions;  // delivered
    uint32_t next_shard = 0;
  };

  void begin_epoch();
  void end_program();
  void fail();
  void fill();
  void renew(uint64_t worker_id);
  void carry_out();
  void take(const wire::ToTrainer& head, const Content& content);
  void consume();
  void deliver(const Content& content);
  void maybe_recall(BatchKey delivered);
  void take_recalled(const wire::ToTrainer& head, const Content& content);
  std::optional<Content> expected() const;

  uint64_t trainer_id_;
  uint32_t job_;
  session::PoolSession session_;
  session::TrainerEnrolment enrolment_;
  std::optional<session::RequestOrder> order_;
  uint64_t requested_count_ = 0;          // of a map-style dataset's epoch
  std::map<uint64_t, Content> ready_;     // by sequence
  std::vector<uint64_t> lane_positions_;  // answered
  Progress progress_;
  bool is_stepping_ = false;
  std::optional<BatchKey> recalled_;  // that the trainer stands still for
  uint64_t recall_number_ = 0;
  uint64_t answerer_id_ = 0;  // the worker that answered last
  std::optional<Instant> waits_since_;
  bool is_done_ = false;
  bool has_left_ = false;
};

}  // namespace penstock::sim
