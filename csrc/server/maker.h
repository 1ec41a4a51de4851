// SPDX-License-Identifier: Apache-2.0
#pragma once
// The maker of a pool worker's batches, as seen by the I/O thread (Maker): a thread of this process, or a separate
// process. It gets a request (PoolWork) and returns the outcome (PoolResult), with the batch (HeldBatch). MakerWatch
// determines whether it is still useful.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "session/dispatch.h"
#include "session/named_batches.h"
#include "wire/blob_record.h"
#include "wire/message.h"
#include "wire/pool_record.h"

namespace penstock::shm {
struct SlabRegion;
}  // namespace penstock::shm

namespace penstock::server {

// A request to a pool worker. A value type.
struct PoolWork {
  uint64_t trainer_id = 0;
  // Counts how often this worker started to serve a trainer without any earlier state of it. A lane that started here
  // in another tenancy has continued on another worker.
  uint64_t tenancy = 0;
  wire::BatchKey key{};
  wire::Lane lane = wire::kNoLane;
  bool is_lane_start = false;
  wire::IndexKind index_kind = wire::IndexKind::kNone;
  uint64_t epoch_seed = 0;
  uint64_t first_place = 0;     // of the first sample in the order of the epoch
  double link_bytes_per_s = 0;  // measured by the trainer; 0: not yet
  std::vector<std::byte> indices{};
  std::vector<std::byte> seeds{};
  std::vector<std::byte> state{};
  std::vector<wire::BlobId> blobs{};                 // the job, followed by its prefixes
  bool is_handed_over = false;                       // as a slab of shared memory
  bool is_named = false;                             // its batch may be kept for requests of the same name
  std::shared_ptr<const session::BatchName> name{};  // in the server; null without is_named
  std::chrono::steady_clock::time_point begun_at{};
  std::chrono::nanoseconds cpu_begun_at{};  // by the process's CPU clock

  // The number of the batch in its epoch.
  uint64_t number() const { return wire::number_of(key); }
  // Whether the trainer already has the batch, except for the leaves that stayed with a worker.
  bool is_recall() const { return wire::is_recall(key); }
  std::span<const wire::BlobId> prefixes() const { return std::span(blobs).subspan(blobs.empty() ? 0 : 1); }
};

// A batch that is kept until the trainer has it. Its memory is released when the server lets go of it or, if it was
// handed over, when the trainer has released it as well.
class HeldBatch {
 public:
  HeldBatch(const HeldBatch&) = delete;
  HeldBatch& operator=(const HeldBatch&) = delete;
  virtual ~HeldBatch() = default;

  // The tensors' bytes, followed by the batch record.
  std::span<const std::byte> payload() const { return payload_; }
  uint32_t record_bytes() const { return record_bytes_; }

  // Null if the batch is not in a slab of this process.
  virtual const shm::SlabRegion* region() const { return nullptr; }
  // The slab was named to the trainer, which will release it.
  virtual void note_handed_over() {}
  virtual bool is_handed_over() const { return false; }

 protected:
  HeldBatch() = default;
  // Sets the location of the batch once it is known; the batch does not move.
  void hold(std::span<const std::byte> payload, uint32_t record_bytes) {
    payload_ = payload;
    record_bytes_ = record_bytes;
  }

 private:
  std::span<const std::byte> payload_;
  uint32_t record_bytes_ = 0;
};

// The outcome of a unit of work.
struct PoolResult {
  enum class Kind : uint8_t {
    kAnswer,
    kGivenUp,     // no longer wanted
    kDeclined,    // this trainer's batches cannot be made here; reason: `text`
    kHandedBack,  // this process can make no more batches; reason: `text`
    kDied,        // the process that made it has ended; how: `text`
  };
  Kind kind = Kind::kAnswer;
  wire::AnswerKind answer = wire::AnswerKind::kNone;
  uint8_t flags = 0;
  std::unique_ptr<HeldBatch> batch = {};
  std::string text = {};  // of an error: the name of its type, a zero byte, and the rest
  std::vector<std::byte> state = {};
  uint32_t fetch_time = 0;
  uint32_t prefix_time = 0;
  wire::SampleTimes samples{};
  uint8_t cpu_share = 0;  // as in PoolAnswer
  uint32_t sample_count = 0;
  uint64_t dataset_size = wire::kSizeUnknown;
  // Of work with a name: the batch is a function of the name, and drew no random number.
  bool may_be_kept = false;
  bool draws_nothing = false;
};

// Which trainer a worker serves, and why it leaves; logged when it changes.
struct Standing {
  enum class DrainCause : uint8_t { kNone, kSigterm, kSigint, kOrder, kShortage };
  uint64_t trainer_id = 0;  // the served trainer; 0: none
  DrainCause drain_cause = DrainCause::kNone;
  uint32_t left_count = 0;  // batches that were started but that its trainer did not have when draining started

  friend bool operator==(const Standing&, const Standing&) = default;
};

// Human-readable; empty for none.
constexpr std::string_view name_of(Standing::DrainCause cause) {
  switch (cause) {
    case Standing::DrainCause::kNone: break;
    case Standing::DrainCause::kSigterm: return "SIGTERM";
    case Standing::DrainCause::kSigint: return "SIGINT";
    case Standing::DrainCause::kOrder: return "penstock drain";
    case Standing::DrainCause::kShortage: return "a shortage";
  }
  return {};
}

// The CPU time by a clock.
inline std::chrono::nanoseconds cpu_time_by(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}
// Of this process, over all its threads.
inline std::chrono::nanoseconds process_cpu_time() { return cpu_time_by(CLOCK_PROCESS_CPUTIME_ID); }
// Of the calling thread.
inline std::chrono::nanoseconds thread_cpu_time() { return cpu_time_by(CLOCK_THREAD_CPUTIME_ID); }

// Only one unit of work is between the I/O thread and the maker at a time; a process may already have the next one, so
// that it need not wait for the server between two batches.
//
// wake() is for any thread; the rest is for the I/O thread, and does not block.
class Maker {
 public:
  struct Needs {
    std::optional<PoolResult> result;
    bool wants_work = false;
    bool is_to_drain = false;
    std::optional<wire::BlobId> blob;
    // After the result: the process that made this trainer's batches has ended while it had no work, and the lanes that
    // it was reading are lost. 0: no process.
    uint64_t lost_process_of = 0;
    std::optional<Fault> failure = {};  // no more batches can be made
  };

  Maker() = default;
  Maker(const Maker&) = delete;
  Maker& operator=(const Maker&) = delete;
  virtual ~Maker() = default;

  // The result is returned once; the other requests are repeated until they are fulfilled.
  virtual Needs take_needs() = 0;
  // Work that was handed ahead is started by offering the same work.
  virtual void offer(std::shared_ptr<const PoolWork> work) = 0;
  // Whether the maker accepts work for the same trainer that will be offered once the current work is done.
  virtual bool wants_ahead() const { return false; }
  // Only if wants_ahead().
  virtual void send_ahead(std::shared_ptr<const PoolWork> /*work*/) {}
  // The work handed ahead will not be offered. No more work is wanted until the maker has let go of it.
  virtual void drop_ahead() {}
  // Whether the batch being made is wanted.
  virtual void set_wanted(bool is_wanted) = 0;
  virtual void give_blob(const wire::BlobId& id, Result<std::vector<std::byte>> bytes) = 0;
  // Human-readable.
  virtual void add_notice(std::string text) = 0;
  virtual void set_standing(const Standing& standing) = 0;
  // No work is offered from now on; the first reason is kept.
  virtual void close(Fault reason) = 0;
  // Makes the I/O thread take a turn.
  virtual void wake() const = 0;

  // Descriptors that need a turn when they are readable.
  virtual std::span<const int> fds() const { return {}; }
  // Call before the next turn with the descriptors that were found readable; the turn reads only these.
  virtual void note_readable(std::span<const int> /*fds*/) {}
  // When a turn is due without a readable descriptor.
  virtual std::optional<Instant> due_at() const { return std::nullopt; }
  // Ends the batch being made, together with its process; `why` is human-readable. Returns false if only ending this
  // process would do so.
  virtual bool end_work(const std::string& /*why*/) { return false; }
  // This trainer has ended, so batches made for it are useless. Gives up a batch that is being made for it.
  virtual void end_trainer(uint64_t /*trainer_id*/) {}
  // Whether there is a process that end_trainer() would end.
  virtual bool has_process_of(uint64_t /*trainer_id*/) const { return false; }
  // The CPU time of all processes of this worker, including ended ones; of a process that several workers share, only
  // this worker's I/O thread counts.
  virtual std::chrono::nanoseconds cpu_time() const { return process_cpu_time(); }
};

// How long a worker may be busy with an unwanted batch before it counts as stuck, and before its process is ended. Both
// are longer if the trainer's batches take longer.
constexpr Duration kStuckAfter = std::chrono::seconds(2);
constexpr Duration kAbandonedGrace = std::chrono::seconds(10);
// The time before its process is ended during the first batch for a trainer: this batch may import modules and open an
// index, and a replacement process would have to do so again.
constexpr Duration kFirstBatchGrace = std::chrono::minutes(5);

struct AbandonedGrace {
  Duration first_batch = kFirstBatchGrace;
  Duration later = kAbandonedGrace;
};

// Whether a worker that has been draining since `drained_at` has used up its time for the work that it had started.
inline bool is_drain_over(std::optional<Instant> drained_at, Duration grace, Instant now) {
  return drained_at && now - *drained_at >= grace;
}

// Whether the thread of a worker that makes batches is useful: it waits for work, or makes a batch that is wanted, for
// any length of time. A batch that is no longer wanted may never end: its sample may wait for a disk that is gone, or
// hold the interpreter's lock in a loop. Pure. Also used by the simulated workers of tests/sim. A value type.
class MakerWatch {
 public:
  enum class State {
    kWaiting,    // for work
    kMaking,     // a batch that is wanted
    kAbandoned,  // neither of these
  };

  // Call at regular intervals.
  void note(State state, Instant now) {
    // Time during which the observer itself did not run, for example because the process was stopped, counts only up to
    // kNoteInterval.
    const Duration passed = noted_at_ ? std::min(now - *noted_at_, kNoteInterval) : Duration(0);
    noted_at_ = now;
    abandoned_ = state == State::kAbandoned ? abandoned_ + passed : Duration(0);
  }
  // Batches of another trainer take a different time.
  void begin_tenancy() { longest_.reset(); }
  void note_made(Duration time) { longest_ = std::max(longest(), time); }

  // How long it has been busy with unwanted work.
  Duration abandoned() const { return abandoned_; }
  bool is_stuck() const { return abandoned_ >= std::max(kStuckAfter, longest()); }
  bool is_lost(const AbandonedGrace& grace) const {
    return abandoned_ >= (longest_ ? std::max(grace.later, 2 * *longest_) : grace.first_batch);
  }

 private:
  static constexpr Duration kNoteInterval = std::chrono::seconds(1);

  Duration longest() const { return longest_.value_or(Duration(0)); }

  std::optional<Instant> noted_at_;
  Duration abandoned_{};
  std::optional<Duration> longest_;  // among the batches of this tenancy; empty before the first is made
};

}  // namespace penstock::server
