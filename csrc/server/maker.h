// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whoever makes the batches of a pool's worker, as the I/O thread sees it: a thread of this process, or a process
// beside it. One piece of work is between the two at a time; a process may have the next one already, so that it need
// not wait for the server between two batches.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/instant.h"
#include "base/result.h"
#include "server/cpu_time.h"
#include "server/pool_work.h"
#include "wire/blob_record.h"

namespace penstock::server {

// For whom a worker works, and why it leaves: its log says so when it changes.
struct Standing {
  enum class DrainCause : uint8_t { kNone, kSigterm, kSigint, kOrder, kShortage };
  uint64_t trainer_id = 0;  // that it works for; 0 for none
  DrainCause drain_cause = DrainCause::kNone;
  uint32_t left_count = 0;  // batches that it had begun and its trainer had not, when it began to drain

  friend bool operator==(const Standing&, const Standing&) = default;
};

// For people; empty for none.
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

// wake() is for any thread; the rest is for the I/O thread, which none of it blocks.
class Maker {
 public:
  struct Asked {
    std::optional<PoolResult> result;
    bool wants_work = false;
    bool is_to_drain = false;
    std::optional<wire::BlobId> blob;
    // Behind the result: the process that made this trainer's batches has ended while it had no work, and the lanes
    // that it was at with it. 0: of none.
    uint64_t lost_process_of = 0;
    std::optional<Fault> failure = {};  // nothing can be made any more
  };

  Maker() = default;
  Maker(const Maker&) = delete;
  Maker& operator=(const Maker&) = delete;
  virtual ~Maker() = default;

  // The result is handed out once; the rest is asked for until it is given.
  virtual Asked take_asked() = 0;
  // What was handed ahead is begun by offering the same.
  virtual void offer(std::shared_ptr<const PoolWork> work) = 0;
  // Whether work for the same trainer may be handed over that will be offered once the work in hand is done.
  virtual bool wants_ahead() const { return false; }
  // Only if wants_ahead().
  virtual void hand_ahead(std::shared_ptr<const PoolWork> /*work*/) {}
  // What was handed ahead will not be offered. Nothing is wanted until whoever makes batches has let go of it.
  virtual void drop_ahead() {}
  // Whether somebody wants the batch that is being made.
  virtual void set_wanted(bool is_wanted) = 0;
  virtual void give_blob(const wire::BlobId& id, Result<std::vector<std::byte>> bytes) = 0;
  // News for people.
  virtual void add_notice(std::string text) = 0;
  virtual void set_standing(const Standing& standing) = 0;
  // Nothing is offered from now on; the first reason stands.
  virtual void close(Fault reason) = 0;
  // Has the I/O thread take a turn.
  virtual void wake() const = 0;

  // Descriptors whose readability is a reason for a turn.
  virtual std::span<const int> fds() const { return {}; }
  // Before the next turn, which reads these alone: those of them that were found readable.
  virtual void note_readable(std::span<const int> /*fds*/) {}
  // When a turn is due without one.
  virtual std::optional<Instant> due_at() const { return std::nullopt; }
  // Ends the batch that is being made, with the process that makes it; `why` is for people. False where only the end of
  // this process would.
  virtual bool end_work(const std::string& /*why*/) { return false; }
  // This trainer has ended, so nothing that was made for it is of use. What is being made for it is given up.
  virtual void end_trainer(uint64_t /*trainer_id*/) {}
  // Whether there is a process that end_trainer() would end.
  virtual bool has_process_of(uint64_t /*trainer_id*/) const { return false; }
  // On CPUs, of all processes of this worker, those that have ended included; of one that several workers share, this
  // worker's I/O thread.
  virtual std::chrono::nanoseconds cpu_time() const { return process_cpu_time(); }
};

}  // namespace penstock::server
