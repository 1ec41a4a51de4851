// SPDX-License-Identifier: Apache-2.0
#pragma once
// The texts of a pool's I/O thread for the user: news, the standing for a user who waits (PoolStanding), and the errors
// in place of batches that no worker could make. PoolNews remembers their content, and which states were reported.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/numerics.h"
#include "loader/incoming_batch.h"
#include "loader/stage_chain.h"
#include "pool_client/controller_link.h"
#include "pool_client/pool_connections.h"
#include "pool_client/pool_io_options.h"
#include "pool_client/worker_links.h"
#include "session/pool_session.h"
#include "wire/message.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::pool_client {

// Owned by PoolIo. Confined to the I/O thread, except the const calls of standing().
class PoolNews {
 public:
  // Arrivals with news pass through `stages`.
  PoolNews(const PoolIoOptions& options, const session::PoolSession& session, PoolConnections& connections,
           loader::StageChain& stages);

  PoolStanding& standing() { return standing_; }
  const PoolStanding& standing() const { return standing_; }

  void tell(std::string news);
  // A worker's id, and its endpoint while there is a link, so that a user can find it.
  std::string format_place(uint64_t worker_id) const;

  // Call at the end of each turn with the number of workers with a link, and whether there was any at the end of the
  // previous turn. Reports a silent controller.
  void note_workers(size_t open_count, bool had_workers, Instant now);
  // Reports the workers that have not answered for kUnresponsiveAfter, or whose chunks have not arrived.
  void note_silent_workers(Instant now);
  // The roster has arrived from the controller, and the session has it.
  void note_declines(const wire::TrainerRoster& roster);
  // The worker has refused or declined to work for this trainer.
  void note_refusal(uint64_t worker_id, const wire::PoolAnswer& answer);
  // Only the first worker with different kernels is reported; the plan and the pool's status show all.
  void note_numerics(uint64_t worker_id, const Numerics& numerics);
  // Reports that the worker cannot be used, unless its trouble was reported already.
  void complain(uint64_t worker_id, WorkerLink& link, const std::string& what);
  // Reports a worker that the session distrusts, and whose link has ended.
  void note_distrust(const session::PoolSession::Command& command, WorkerLink& link);

  // The following calls record the failures of requests, for the errors in place of their batches.

  // The connection to the worker, or its process, was lost.
  void note_lost(const WorkerLink& link) { lost_at_ = link.endpoint().text(); }
  // A worker's process died of the request; the answer reports how it ended.
  void note_end(const wire::PoolAnswer& answer) {
    reported_ends_[answer.message.key] = loader::format_end(answer.body);
  }
  // The session distrusts a worker: if it was asked for a batch, it has answered that request wrongly.
  void note_wrong_answer(const session::PoolSession::Command& command);
  // An answer to the request counts.
  void note_answered(wire::BatchKey key);
  void forget(wire::BatchKey key);
  // Forgets all requests but recalls.
  void forget_epoch();
  // The error in place of a batch that workers died of, or answered wrongly.
  std::unique_ptr<loader::Batch> error_in_place(const session::PoolSession::Command& command);

 private:
  void warn_of_decline(const std::string& worker, const std::string& reason);
  // Advice about a worker whose answers are wrong, to append to the news about it. Empty for an own worker.
  std::string format_hint(uint64_t worker_id) const;
  std::string deaths_of_last_workers() const;
  loader::DeathTraces traces_of(wire::BatchKey key) const;
  void note_controller(Instant now, size_t open_count);

  const PoolIoOptions& options_;
  const session::PoolSession& session_;
  PoolConnections& connections_;
  loader::StageChain& stages_;
  PoolStanding standing_;

  // By unanswered request: the last worker that answered it wrongly, the fault, and the advice.
  struct WrongAnswer {
    std::string place;
    std::string reason;
  };
  std::map<wire::BatchKey, WrongAnswer> wrong_answers_;
  // By unanswered request: how the process ended, as reported by the last worker whose process died of the request.
  std::map<wire::BatchKey, std::string> reported_ends_;

  bool is_unresponsive_logged_ = false;
  bool was_served_ = false;   // a worker has answered a request
  bool is_hopeless_ = false;  // every worker of the pool has declined this trainer
  std::string lost_at_;       // the endpoint of the last worker whose connection, or whose process, was lost
};

}  // namespace penstock::pool_client
