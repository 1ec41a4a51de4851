// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which worker of a pool makes which batch. Workers come and go; a request is never forgotten because of that, and
// never answered twice. A pure state machine of the trainer: events in, commands out, no clock, no socket.
//
//   where     to the worker that will answer soonest by its own mean, within its credit; requests in order, recalls
//             first
//   loss      what a lost or drained worker owed is asked for elsewhere
//   hedge     what takes far longer than most is asked of a second, idle worker; the first answer wins
//   poison    a worker that dies over a batch that it had begun may have died of it. That batch then runs alone on an
//             idle worker, so that the next death is its own; after `deaths_max` of them it fails. It is hedged late,
//             since it may kill the second worker, too; but the first may hang for ever
//   lanes     the batches of one shard of an iterable dataset follow from each other: one worker makes them, in order,
//             until it is lost; another goes on after the last one that was answered
//
// Credit is in bytes: a worker is asked for no more than `credit_bytes` hold by the largest batch seen so far. One
// batch is always asked for, whatever its size.
//
// Invariant: a request is unanswered and either waits, or is with one worker, or with two when it was hedged.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/instant.h"
#include "cluster/request_content.h"
#include "cluster/service_times.h"
#include "wire/batch_key.h"
#include "wire/data_message.h"

namespace penstock::cluster {

// A small batch is made sooner than the request for it has crossed two processes, so that few requests at once leave a
// worker idle. One whose batches take less than kQuickBatch may have kQuickDepth, together of kQuickBytes at most.
constexpr Duration kQuickBatch = std::chrono::milliseconds(5);
constexpr uint32_t kQuickDepth = 8;
constexpr uint64_t kQuickBytes = 16 << 20;

// Requests to a worker that are remembered, answered or not.
constexpr size_t kRememberedCountMax = 4096;

struct DispatchOptions {
  uint32_t depth_max = 2;        // requests that a worker may have at once
  uint32_t quick_depth_max = 0;  // the same, of one whose batches take less than kQuickBatch, if it is more
  uint32_t deaths_max = 3;
  // A worker whose batches take longer by its mean is asked for one at a time: the next request waits for the first
  // worker that is free.
  Duration asked_ahead_below = Duration::max();
  bool hedges = true;
  // Workers do not say which request they have begun: any batch that a worker owes when it dies may have been to blame.
  bool blames_all = false;
  // A request is late once its worker took `hedge_factor` times the `hedge_quantile` of the batches' times, and
  // `hedge_floor` at least. Before `hedge_samples_min` batches have come little is known of these times, and a request
  // is late after `early_hedge_factor` times the longest, and `early_hedge_floor` at least: a worker that is stuck in
  // one of a job's first batches holds up all that comes behind. So is, at any time, one over which a worker has died.
  double hedge_quantile = 0.95;
  double hedge_factor = 2.0;
  Duration hedge_floor = std::chrono::milliseconds(50);
  size_t hedge_samples_min = 16;
  double early_hedge_factor = 5.0;
  Duration early_hedge_floor = std::chrono::seconds(10);
};

// A worker as the trainer numbers it; a worker that was lost and came back has another number.
using WorkerSlot = uint32_t;

enum class Loss : uint8_t {
  kDied,    // its process ended, and it had not said that it would
  kSilent,  // nothing was heard of it, which no batch is to blame for
  kLeft,    // it had nothing more to do, or gave its requests back
};

// Thread-compatible.
class Dispatch {
 public:
  explicit Dispatch(const DispatchOptions& options);

  struct Command {
    enum class Kind : uint8_t {
      kAsk,     // send this request to the worker
      kCancel,  // the worker's answer to it is not wanted any more: nobody waits for the batch, or it has come
      kFail,    // too many workers died of it
      kIdle,    // a worker that is being drained owes nothing more
    };
    Kind kind = Kind::kAsk;
    WorkerSlot worker = 0;
    wire::BatchKey key{};
    wire::Lane lane = wire::kNoLane;
    bool is_lane_start = false;  // the worker has not made the batches before this one in the lane
    bool has_come = false;       // of kCancel: another worker's answer came first
    uint32_t death_count = 0;    // of kFail
    SharedContent content{};     // of kFail: the content of the request

    friend bool operator==(const Command&, const Command&) = default;
  };
  // The commands that follow from the events since the last call, in order.
  std::vector<Command> take_commands();

  // Workers. A slot is used once.
  void add_worker(WorkerSlot slot, uint64_t credit_bytes, Instant now);
  void lose_worker(WorkerSlot slot, Loss loss, Instant now);
  // Takes back a death that this was blamed for: the worker lives, and only the connection to it had ended.
  void forgive(wire::BatchKey key, Instant now);
  // Asks it for nothing more, and asks others for the requests that it has not begun.
  void drain_worker(WorkerSlot slot, Instant now);
  bool has_worker(WorkerSlot slot) const { return workers_.contains(slot); }

  // Requests. `lane` keys are asked for by ascending sequence. `content` is kept until the request is answered. A
  // recall goes before all others, since the trainer stands still for it, and to `preferred` if that has room: it may
  // have the batch still.
  void ask(wire::BatchKey key, wire::Lane lane, Instant now, SharedContent content = nullptr,
           std::optional<WorkerSlot> preferred = std::nullopt);
  // Takes a request back. Its answer will be dropped.
  void forget(wire::BatchKey key, Instant now);
  // Takes every request of another epoch than this one back, but for recalls.
  void forget_other_epochs(uint32_t epoch, Instant now);
  // A lane has no more batches: its requests are forgotten.
  void end_lane(uint32_t epoch, wire::Lane lane, Instant now);

  // Whether the worker was ever asked for this. Answers to requests that were taken back may be on their way.
  bool was_asked(WorkerSlot slot, wire::BatchKey key) const;

  // The workers' messages.
  void started(WorkerSlot slot, wire::BatchKey key);
  // True if this is the answer to an unanswered request: the one that counts.
  [[nodiscard]] bool answered(WorkerSlot slot, wire::BatchKey key, uint64_t bytes, Instant now);
  void handed_back(WorkerSlot slot, wire::BatchKey key, Instant now);

  // Whether requests that are late are asked of a second worker from now on.
  void set_hedges(bool hedges) { options_.hedges = hedges; }
  // Looks for requests that are late.
  void tick(Instant now);
  // When tick() may next find something to do.
  std::optional<Instant> next_tick() const;

  size_t unanswered_count() const { return requests_.size(); }
  size_t waiting_count() const { return waiting_.size(); }
  size_t worker_count() const { return workers_.size(); }
  bool is_unanswered(wire::BatchKey key) const { return requests_.contains(key); }
  // The unanswered requests to a worker, in the order of asking.
  std::span<const wire::BatchKey> outstanding(WorkerSlot slot) const;
  // The request that a worker has begun and not answered.
  std::optional<wire::BatchKey> running(WorkerSlot slot) const;
  // The lane of an unanswered request, and whether the worker that is asked has not made the batches before it.
  wire::Lane lane_of(wire::BatchKey key) const { return requests_.at(key).lane; }
  bool is_lane_start(wire::BatchKey key) const { return requests_.at(key).is_lane_start; }
  // The content of the request; null if it was answered, forgotten, or asked without a content.
  SharedContent content_of(wire::BatchKey key) const;
  // The unanswered request over which most workers have died, and how many; none if none has.
  std::optional<std::pair<wire::BatchKey, uint32_t>> deadliest() const;
  uint64_t hedge_count() const { return hedge_count_; }
  uint64_t reissue_count() const { return reissue_count_; }

 private:
  struct Worker {
    uint64_t credit_bytes = 0;
    bool is_draining = false;
    bool is_idle_told = false;
    std::vector<wire::BatchKey> outstanding;  // in the order of asking
    std::map<wire::BatchKey, Instant> asked_at;
    std::set<wire::BatchKey> ever_asked;    // the latest kRememberedCountMax
    std::optional<wire::BatchKey> running;  // begun, and not answered
    Instant answered_at{};                  // or added
    MeanTime mean;
    std::optional<wire::BatchKey> alone;  // nothing else may be asked of it
  };
  struct Request {
    wire::Lane lane = wire::kNoLane;
    bool is_lane_start = false;  // for the worker that was asked
    uint32_t death_count = 0;
    std::vector<WorkerSlot> workers{};  // that were asked and have not answered
    SharedContent content{};
    std::optional<WorkerSlot> preferred{};
  };
  using LaneId = std::pair<uint32_t, wire::Lane>;  // epoch and lane
  // After how long a request is late.
  struct LateAfter {
    Duration usual{};
    Duration deadly{};  // over which a worker has died
    Duration of(const Request& request) const { return request.death_count > 0 ? deadly : usual; }
  };

  void place(Instant now);
  std::optional<WorkerSlot> choose(wire::BatchKey key, const Request& request, Instant now);
  bool has_room(const Worker& worker, bool is_recall) const;
  Duration usual_time(const Worker& worker) const;
  Duration answer_time(const Worker& worker, Instant now) const;
  void ask_of(WorkerSlot slot, wire::BatchKey key, Request& request, Instant now);
  void take_from(WorkerSlot slot, wire::BatchKey key);
  void tell_if_idle(WorkerSlot slot);
  void fail(wire::BatchKey key);
  void cancel_copies(wire::BatchKey key, const Request& request, std::optional<WorkerSlot> answerer = std::nullopt);
  std::optional<WorkerSlot> idle_worker() const;
  static bool may_be_hedged(const Request& request);
  void unreserve(wire::BatchKey key);
  Duration busy_time(const Worker& worker, wire::BatchKey key, Instant now) const;
  std::optional<LateAfter> late_after() const;

  DispatchOptions options_;
  std::map<WorkerSlot, Worker> workers_;
  std::map<wire::BatchKey, Request> requests_;
  struct RecallsFirst {
    bool operator()(const wire::BatchKey& a, const wire::BatchKey& b) const {
      return wire::is_recall(a) != wire::is_recall(b) ? wire::is_recall(a) : a < b;
    }
  };
  std::set<wire::BatchKey, RecallsFirst> waiting_;
  std::map<LaneId, WorkerSlot> lanes_;  // that a worker has
  uint64_t largest_bytes_ = 0;
  RecentTimes times_;
  std::vector<Command> commands_;
  uint64_t hedge_count_ = 0;
  uint64_t reissue_count_ = 0;
};

}  // namespace penstock::cluster
