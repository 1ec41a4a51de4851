// SPDX-License-Identifier: Apache-2.0
#pragma once
// The thread that communicates with a pool for a trainer: a socket to the controller, one to each worker, and a clock
// around session/pool_session.h. The session decides which worker makes which batch and keeps the requests; the parts
// of this thread hold their bytes, and assemble batches from chunks. Changes of the workers are invisible to the client
// above.
//
// PoolIo owns the parts and calls them once a turn:
//
//     TrainerRequests ─ requests ─▶ PoolSession ─ commands ─▶ TrainerRequests ─ connections, messages ─▶ workers
//     workers ─ messages, chunks ─▶ AnswerReceiver ─ answers ─▶ PoolSession; batches ─▶ TrainerRequests ─▶ the trainer
//
// PoolConnections has the sockets, TrainerReports the measurements for the controller, and PoolNews the texts for the
// user. A part refers only to parts that are declared before it in PoolIo.

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "base/clock.h"
#include "base/event_loop.h"
#include "loader/batch_memory.h"
#include "loader/batch_source.h"
#include "loader/inbox.h"
#include "loader/stage_chain.h"
#include "net/keys.h"
#include "pool_client/answer_receiver.h"
#include "pool_client/blob_store.h"
#include "pool_client/pool_connections.h"
#include "pool_client/pool_directory.h"
#include "pool_client/pool_io_options.h"
#include "pool_client/pool_news.h"
#include "pool_client/trainer_reports.h"
#include "pool_client/trainer_requests.h"
#include "session/pool_session.h"

namespace penstock::pool_client {

// Confined to the loop's thread, except where a comment states otherwise.
class PoolIo final : public EventLoop::Handler {
 public:
  // Arrivals pass through `stages` to `inbox`. Both, and `options`, outlive this.
  PoolIo(const PoolIoOptions& options, const net::RunId& run, PoolDirectory directory, loader::StageChain& stages,
         loader::Inbox& inbox);

  // The calls up to retire_held() are for any thread.
  BlobStore& blobs() { return blobs_; }
  const PoolStanding& standing() const { return news_.standing(); }
  uint32_t worker_count() const { return worker_count_.load(); }
  loader::LinkStanding link() const { return reports_.link(); }
  void note_pace(const loader::TrainerPace& pace) { reports_.note_pace(pace); }
  void set_plan(const std::string& json, uint64_t change_count) { reports_.set_plan(json, change_count); }
  // The resources that the pool's workers have spent so far, according to their reports.
  wire::JobCosts costs() const { return reports_.costs(); }
  void retire_held() {
    memory_.retire_held();
    connections_.retire_held();
  }

  // See TrainerRequests.
  void begin_epoch(uint32_t epoch, std::map<wire::Lane, LanePlaces::Place> lanes);
  void ask(session::SharedContent content);
  void recall(const loader::BatchRecord::Origin& origin);
  void forget_recall(const loader::BatchRecord::Origin& origin);

  void lose_own_worker(uint64_t worker_id);

  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;
  void failed(Fault error) override { stages_.fail(0, error); }

 private:
  Result<void> serve_controller(Instant now);
  void set_roster(Instant now);
  void note_standing(Instant now);

  const PoolIoOptions& options_;
  const net::RunId run_;
  loader::StageChain& stages_;
  std::atomic<uint32_t> worker_count_{0};
  BlobStore blobs_;
  loader::BatchMemory memory_;
  session::PoolSession session_;
  PoolConnections connections_;
  PoolNews news_;
  TrainerReports reports_;
  TrainerRequests requests_;
  AnswerReceiver answers_;
  Instant silent_links_at_{};  // the next check for silent workers, and for connections that have rested too long
};

}  // namespace penstock::pool_client
