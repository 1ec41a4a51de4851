// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's requests to a pool, from the call that asks for a batch to the delivery of the batch, of the end of a
// shard, or of an error. PoolSession decides when to send which request to which worker; its commands are carried out
// here. A batch may be requested twice, to compare workers of different kinds (kind_comparison.h).

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>

#include "base/clock.h"
#include "base/numerics.h"
#include "loader/batch.h"
#include "loader/inbox.h"
#include "loader/stage_chain.h"
#include "pool_client/blob_store.h"
#include "pool_client/kind_comparison.h"
#include "pool_client/pool_connections.h"
#include "pool_client/pool_io_options.h"
#include "pool_client/pool_news.h"
#include "pool_client/trainer_reports.h"
#include "session/pool_session.h"
#include "wire/message.h"
#include "wire/pool_record.h"

namespace penstock::pool_client {

// Owned by PoolIo. Confined to the I/O thread.
class TrainerRequests {
 public:
  // Arrivals pass through `stages` to `inbox`.
  TrainerRequests(const PoolIoOptions& options, session::PoolSession& session, PoolConnections& connections,
                  PoolNews& news, TrainerReports& reports, loader::StageChain& stages, loader::Inbox& inbox);

  // Forgets requests of earlier epochs.
  void begin_epoch(uint32_t epoch, std::map<wire::Lane, LanePlaces::Place> lanes);
  void ask(session::SharedContent content);
  // Repeats the request that the batch answered: its epoch may be over, and its blobs are the original ones.
  void recall(const loader::BatchRecord::Origin& origin);
  void forget_recall(const loader::BatchRecord::Origin& origin);

  // Carries out the session's commands, and those that result from them. Call it after each event for the session.
  void carry_out();
  // Connects to the workers for which a former attempt has failed and another one is due.
  void connect_again(Instant now);

  // The request's batch, or the error in its place.
  void deliver(wire::BatchKey key, std::unique_ptr<loader::Batch> batch,
               std::optional<loader::NarrowArrival> narrow = {});
  void end_lane(wire::BatchKey key, wire::Lane lane, Instant now);
  // A batch of the lane was answered; `state` is the state of the dataset after it.
  void note_progress(wire::Lane lane, std::span<const std::byte> state) { lanes_.answered(lane, state); }

  // The worker has reported its numerics.
  void note_numerics(uint64_t worker_id, const Numerics& numerics);
  // Whether the batch was requested for a comparison.
  bool is_compared(wire::BatchKey key) const { return kinds_.awaits(key); }
  // The batch of such a request has arrived.
  void note_compared(uint64_t worker_id, const loader::Batch& batch);
  // Requests the batch from a worker of another kind as well, if the two kinds were not compared yet.
  void compare_kinds(uint64_t worker_id, const wire::PoolAnswer& answer, const loader::Batch& batch,
                     const session::SharedContent& content, Instant now);

 private:
  using Command = session::PoolSession::Command;

  // Makes a report due soon if the trainer was idle: its workers may have been assigned to others.
  void hurry_if_idle(Instant now);
  void connect(uint64_t worker_id);
  void disconnect(const Command& command);
  void send(const Command& command);
  void begin_link(uint64_t worker_id, uint32_t number, wire::SealOffer& offer);
  void end_distrusted(const Command& command);

  const PoolIoOptions& options_;
  session::PoolSession& session_;
  PoolConnections& connections_;
  PoolNews& news_;
  TrainerReports& reports_;
  loader::StageChain& stages_;
  loader::Inbox& inbox_;

  uint32_t epoch_ = 0;
  LanePlaces lanes_;
  std::set<wire::Lane> ended_lanes_;
  KindComparison kinds_;
};

}  // namespace penstock::pool_client
