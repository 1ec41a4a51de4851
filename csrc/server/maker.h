// SPDX-License-Identifier: Apache-2.0
#pragma once
// The maker of a pool worker's batches, as seen by the I/O thread: a thread of this process, or a separate process.
// Only one unit of work is between the two at a time; a process may already have the next one, so that it need not wait
// for the server between two batches.

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

// wake() is for any thread; the rest is for the I/O thread, and does not block.
class Maker {
 public:
  struct Asked {
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
  virtual Asked take_asked() = 0;
  // Work that was handed ahead is started by offering the same work.
  virtual void offer(std::shared_ptr<const PoolWork> work) = 0;
  // Whether the maker accepts work for the same trainer that will be offered once the current work is done.
  virtual bool wants_ahead() const { return false; }
  // Only if wants_ahead().
  virtual void hand_ahead(std::shared_ptr<const PoolWork> /*work*/) {}
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

}  // namespace penstock::server
