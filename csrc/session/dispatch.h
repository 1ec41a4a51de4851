// SPDX-License-Identifier: Apache-2.0
#pragma once
// Dispatch, which decides which worker of a pool makes which batch, and the times by which it decides: how long a
// worker takes per batch, for the last few batches that the pool answered. There is a mean for each worker, and a
// quantile over all workers, beyond which a batch counts as late.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "session/request_order.h"
#include "wire/message.h"

namespace penstock::session {

// A worker's mean time. Forgets gradually: after `1 / kNewShare` batches the weight of the earlier ones is a third. A
// value type.
class MeanTime {
 public:
  void add(Duration time) {
    mean_ = mean_ ? *mean_ + std::chrono::duration_cast<Duration>((time - *mean_) * kNewShare) : time;
  }
  std::optional<Duration> value() const { return mean_; }

 private:
  static constexpr double kNewShare = 0.2;
  std::optional<Duration> mean_;
};

// The last kCount times of all workers. A value type.
class RecentTimes {
 public:
  static constexpr size_t kCount = 64;

  void add(Duration time) {
    times_[added_count_ % kCount] = time;
    ++added_count_;
  }

  size_t count() const { return std::min<uint64_t>(added_count_, kCount); }

  // The time that a `share` of them does not exceed; needs at least one.
  Duration quantile(double share) const {
    std::array<Duration, kCount> sorted = times_;
    const auto end = sorted.begin() + static_cast<ptrdiff_t>(count());
    const auto place = sorted.begin() + static_cast<ptrdiff_t>(share * static_cast<double>(count() - 1));
    std::nth_element(sorted.begin(), place, end);
    return *place;
  }

 private:
  std::array<Duration, kCount> times_{};
  uint64_t added_count_ = 0;
};

// A small batch is made before the request for it has crossed two processes, so with few concurrent requests a worker
// would be idle. A worker whose batches take less than kQuickBatch may have kQuickDepth requests, of kQuickBytes at
// most in total.
constexpr Duration kQuickBatch = std::chrono::milliseconds(5);
constexpr uint32_t kQuickDepth = 8;
constexpr uint64_t kQuickBytes = 16 << 20;

// Requests to a worker that are remembered, answered or not.
constexpr size_t kRememberedCountMax = 4096;

struct DispatchOptions {
  uint32_t depth_max = 2;        // concurrent requests to a worker
  uint32_t quick_depth_max = 0;  // the same for a worker whose batches take less than kQuickBatch, if larger
  uint32_t deaths_max = 3;
  // A worker is asked ahead only as long as its outstanding requests take less, by its mean; later requests wait for
  // the first free worker, so that few of them are behind a batch that is slower than the mean.
  Duration request_ahead_below = Duration::max();
  bool hedges = true;
  // Workers do not report which request they have started: any outstanding batch of a dead worker may be to blame.
  bool blames_all = false;
  // A request is late once its worker took `hedge_factor` times the `hedge_quantile` of the batches' times, and at
  // least `hedge_floor`. Until `hedge_samples_min` batches have arrived these times are not well known, and a request
  // is late after `early_hedge_factor` times the longest, and at least `early_hedge_floor`: a worker that hangs in one
  // of a job's first batches blocks all following ones. The same rule holds at any time for a request during which a
  // worker has died.
  double hedge_quantile = 0.95;
  double hedge_factor = 2.0;
  Duration hedge_floor = std::chrono::milliseconds(50);
  size_t hedge_samples_min = 16;
  double early_hedge_factor = 5.0;
  Duration early_hedge_floor = std::chrono::seconds(10);
};

// The trainer's number for a worker; a worker that was lost and returned has another number.
using WorkerSlot = uint32_t;

enum class Loss : uint8_t {
  kDied,    // its process ended without an announcement
  kSilent,  // no messages arrived from it, for which no batch is to blame
  kLeft,    // it had no more work, or handed its requests back
};

// Workers join and leave; a request is never forgotten because of that, and never answered twice. A pure state machine
// of the trainer: takes events, returns commands, has no clock and no socket.
//
//   where     the worker that will answer soonest by its own mean, within its credit; requests in order, recalls first
//   loss      the outstanding batches of a lost or drained worker are requested elsewhere
//   hedge     a batch that takes much longer than most is requested from a second, idle worker; the first answer wins
//   poison    if a worker dies while it works on a batch, the batch may be the cause. It then runs alone on an idle
//             worker, so that it is the only suspect for the next death; after `deaths_max` deaths it fails. It is
//             hedged late, because it may kill the second worker, too; but the first worker may hang for ever
//   lanes     the batches of one shard of an iterable dataset depend on each other: one worker makes them, in order,
//             until it is lost; another one continues after the last batch that was answered
//
// Credit is in bytes: a worker is asked for as many batches as fit into `credit_bytes`, by the largest batch seen so
// far. One batch of any size is always allowed.
//
// Invariant: a request is unanswered and is waiting, or at one worker, or at two if it was hedged.
//
// Thread-compatible.
class Dispatch {
 public:
  explicit Dispatch(const DispatchOptions& options);

  struct Command {
    enum class Kind : uint8_t {
      kSendRequest,  // send this request to the worker
      kCancel,       // the worker's answer is no longer wanted: the batch was taken back, or has arrived
      kFail,         // too many workers died during this request
      kIdle,         // a worker that is being drained has no outstanding requests left
    };
    Kind kind = Kind::kSendRequest;
    WorkerSlot worker = 0;
    wire::BatchKey key{};
    wire::Lane lane = wire::kNoLane;
    bool is_lane_start = false;  // the worker has not made the previous batches of the lane
    bool has_come = false;       // of kCancel: another worker has answered first
    uint32_t death_count = 0;    // of kFail
    SharedContent content{};     // of kFail: the content of the request

    friend bool operator==(const Command&, const Command&) = default;
  };
  // The commands that result from the events since the last call, in order.
  std::vector<Command> take_commands();

  // Workers. A slot is used once.
  void add_worker(WorkerSlot slot, uint64_t credit_bytes, Instant now);
  void lose_worker(WorkerSlot slot, Loss loss, Instant now);
  // Revokes a death that was attributed to this request: the worker is alive, and only its connection had ended.
  void forgive(wire::BatchKey key, Instant now);
  // Sends the worker no further requests, and requests the batches that it has not started from others.
  void drain_worker(WorkerSlot slot, Instant now);
  bool has_worker(WorkerSlot slot) const { return workers_.contains(slot); }

  // Requests. The keys of a `lane` are requested by ascending sequence. `content` is kept until the request is
  // answered. A recall has priority over all other requests, because the trainer is blocked until it arrives, and is
  // sent to `preferred` if that worker has room: it may still have the batch.
  void ask(wire::BatchKey key, wire::Lane lane, Instant now, SharedContent content = nullptr,
           std::optional<WorkerSlot> preferred = std::nullopt);
  // Takes a request back. Its answer will be dropped.
  void forget(wire::BatchKey key, Instant now);
  // Takes back all requests of other epochs, except recalls.
  void forget_other_epochs(uint32_t epoch, Instant now);
  // The lane has no more batches: its requests are forgotten.
  void end_lane(uint32_t epoch, wire::Lane lane, Instant now);

  // Whether the worker was ever asked for this. Answers to requests that were taken back may still arrive.
  bool was_requested(WorkerSlot slot, wire::BatchKey key) const;

  // Messages from workers.
  void started(WorkerSlot slot, wire::BatchKey key);
  // Returns true if this is the first answer to the request, which is the one that counts.
  [[nodiscard]] bool answered(WorkerSlot slot, wire::BatchKey key, uint64_t bytes, Instant now);
  void handed_back(WorkerSlot slot, wire::BatchKey key, Instant now);

  // Whether late requests are sent to a second worker from now on.
  void set_hedges(bool hedges) { options_.hedges = hedges; }
  // Checks for late requests.
  void tick(Instant now);
  // The earliest time at which tick() may have work.
  std::optional<Instant> next_tick() const;

  size_t unanswered_count() const { return requests_.size(); }
  size_t waiting_count() const { return waiting_.size(); }
  size_t worker_count() const { return workers_.size(); }
  bool is_unanswered(wire::BatchKey key) const { return requests_.contains(key); }
  // The unanswered requests to a worker, in the order in which they were sent.
  std::span<const wire::BatchKey> outstanding(WorkerSlot slot) const;
  // The request that a worker has started and not answered.
  std::optional<wire::BatchKey> running(WorkerSlot slot) const;
  // The lane of an unanswered request, and whether the worker that has it did not make the previous batches of the
  // lane.
  wire::Lane lane_of(wire::BatchKey key) const { return requests_.at(key).lane; }
  bool is_lane_start(wire::BatchKey key) const { return requests_.at(key).is_lane_start; }
  // The content of the request; null if it was answered, forgotten, or sent without content.
  SharedContent content_of(wire::BatchKey key) const;
  // The unanswered request with the most worker deaths, and their number; none if there were no deaths.
  std::optional<std::pair<wire::BatchKey, uint32_t>> deadliest() const;
  uint64_t hedge_count() const { return hedge_count_; }
  uint64_t reissue_count() const { return reissue_count_; }

 private:
  struct Worker {
    uint64_t credit_bytes = 0;
    bool is_draining = false;
    bool is_idle_reported = false;
    std::vector<wire::BatchKey> outstanding;  // in the order in which they were sent
    std::map<wire::BatchKey, Instant> asked_at;
    std::set<wire::BatchKey> ever_requested;  // the latest kRememberedCountMax
    std::optional<wire::BatchKey> running;    // started and not answered
    Instant answered_at{};                    // time of the last answer, or of the worker's addition
    MeanTime mean;
    std::optional<wire::BatchKey> alone;  // it receives no other requests
  };
  struct Request {
    wire::Lane lane = wire::kNoLane;
    bool is_lane_start = false;  // for the worker that was asked
    uint32_t death_count = 0;
    std::vector<WorkerSlot> workers{};  // workers that were asked and have not answered
    SharedContent content{};
    std::optional<WorkerSlot> preferred{};
  };
  using LaneId = std::pair<uint32_t, wire::Lane>;  // epoch and lane
  // The time after which a request is late.
  struct LateAfter {
    Duration usual{};
    Duration deadly{};  // for a request during which a worker has died
    Duration of(const Request& request) const { return request.death_count > 0 ? deadly : usual; }
  };

  void place(Instant now);
  std::optional<WorkerSlot> choose(wire::BatchKey key, const Request& request, Instant now);
  bool has_room(const Worker& worker, bool is_recall) const;
  Duration usual_time(const Worker& worker) const;
  Duration answer_time(const Worker& worker, Instant now) const;
  void request_from(WorkerSlot slot, wire::BatchKey key, Request& request, Instant now);
  void take_from(WorkerSlot slot, wire::BatchKey key);
  void report_if_idle(WorkerSlot slot);
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
  std::map<LaneId, WorkerSlot> lanes_;  // the worker of each lane
  uint64_t largest_bytes_ = 0;
  RecentTimes times_;
  std::vector<Command> commands_;
  uint64_t hedge_count_ = 0;
  uint64_t reissue_count_ = 0;
};

}  // namespace penstock::session
