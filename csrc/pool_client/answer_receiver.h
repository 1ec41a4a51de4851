// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a trainer receives from its workers. AnswerReceiver serves the connections that are ready, in turns of bounded
// length: messages, which are passed to PoolSession in the order of their link, and the chunks of batches, which are
// decrypted into the trainer's slabs. A worker on this machine hands over slabs instead of sending chunks.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/result.h"
#include "loader/batch.h"
#include "loader/batch_memory.h"
#include "loader/incoming_batch.h"
#include "loader/stage_chain.h"
#include "net/client_socket.h"
#include "pool_client/blob_store.h"
#include "pool_client/pool_connections.h"
#include "pool_client/pool_io_options.h"
#include "pool_client/pool_news.h"
#include "pool_client/trainer_reports.h"
#include "pool_client/trainer_requests.h"
#include "pool_client/worker_links.h"
#include "session/pool_session.h"
#include "wire/message.h"
#include "wire/pool_record.h"

namespace penstock::pool_client {

// Owned by PoolIo. Confined to the I/O thread.
class AnswerReceiver {
 public:
  // Chunks are assembled in `memory`; `blobs` are for workers to fetch.
  AnswerReceiver(const PoolIoOptions& options, session::PoolSession& session, PoolConnections& connections,
                 PoolNews& news, TrainerReports& reports, TrainerRequests& requests, const BlobStore& blobs,
                 loader::BatchMemory& memory, loader::StageChain& stages);

  // Serves the workers that are ready. Workers whose chunks had to wait for the next turn are the first in it.
  void serve(Instant now);

 private:
  using BatchKey = wire::BatchKey;

  WorkerLinks& links() const { return connections_.links(); }
  void serve_worker(uint64_t worker_id, Instant now);
  void take_event(uint64_t worker_id, WorkerLink& link, const net::ConnectionEvent& event, Instant now);
  void receive_from(uint64_t worker_id, size_t message_count_max, Instant now);
  void take_message(uint64_t worker_id, WorkerLink& link, std::span<net::ReceivedPart> parts, Instant now);
  void refuse_message(uint64_t worker_id, WorkerLink& link, const std::string& what, Instant now);
  // Takes the message in `part`, or appends it to the waiting messages.
  void take_answer(uint64_t worker_id, WorkerLink& link, net::ReceivedPart part, Instant now);
  bool waits_for_pieces(WorkerLink& link, const wire::PoolAnswer& answer) const;
  void take_waiting(uint64_t worker_id, Instant now);
  void note_message(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer);

  // Processes a message whose turn it is.
  void take_answer_in_turn(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, Instant now);
  // Processes an answer that counts. `batch` is null for the end of a lane.
  void accept(uint64_t worker_id, const wire::PoolAnswer& answer, wire::Lane lane,
              const session::SharedContent& content, std::unique_ptr<loader::Batch> batch, Instant now);
  // The batch of an answer to a request of this lane, or the error in its place; null for the end of a lane.
  Result<std::unique_ptr<loader::Batch>> read_answer(uint64_t worker_id, const wire::PoolAnswer& answer,
                                                     wire::Lane lane, std::optional<loader::IncomingBatch> whole);
  bool has_other_dataset(const wire::PoolAnswer& answer) const;
  std::unique_ptr<loader::Batch> error_of_dataset(const wire::PoolAnswer& answer, const std::string& place) const;
  // Whether the request names leaves to withhold.
  bool may_withhold(BatchKey key) const;
  // The batch in the slab that an own worker names.
  Result<loader::IncomingBatch> take_slab(WorkerLink& link, const wire::PoolAnswer& answer);
  void note_death(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, bool is_awaited);

  void connect_data(uint64_t worker_id, WorkerLink& link, const wire::SealGrant& grant, Instant now);
  void serve_data(uint64_t worker_id, Instant now);
  void receive_pieces(uint64_t worker_id, size_t piece_count_max, Instant now);
  // From now on messages on the link are ignored, even while the next link has to wait.
  void lose_track(uint64_t worker_id, uint32_t number, Instant now);

  const PoolIoOptions& options_;
  session::PoolSession& session_;
  PoolConnections& connections_;
  PoolNews& news_;
  TrainerReports& reports_;
  TrainerRequests& requests_;
  const BlobStore& blobs_;
  loader::BatchMemory& memory_;
  loader::StageChain& stages_;
  uint64_t opened_bytes_ = 0;  // of chunks, in this turn
  uint64_t last_opened_ = 0;   // the worker whose chunks were decrypted last
};

}  // namespace penstock::pool_client
