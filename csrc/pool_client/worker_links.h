// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connections to a pool's workers. WorkerLinks holds them and selects the ones to serve. A WorkerLink has
// the connections to one worker, and its DataLink receives the chunks of that worker's batches.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "loader/batch_memory.h"
#include "loader/incoming_batch.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/socket.h"
#include "net/tcp_socket.h"
#include "wire/blob_record.h"
#include "wire/message.h"
#include "wire/pool_record.h"

namespace penstock::pool_client {

// The batch chunks of one link with a worker: the agreed keys, the connection that carries the chunks, and the batches
// that are assembled from them. Confined to the I/O thread.
class DataLink {
 public:
  // For the link that the trainer's hello with this offer starts.
  DataLink(const net::LinkName& name, const wire::SealOffer& offer) : name_(name), offer_(offer) {}

  uint32_t number() const { return name_.link; }

  // Connects once the worker has reported how its chunks are sealed, and where to get them. Call it once.
  Result<void> connect(net::SocketContext& context, net::Resolver& resolver, const wire::SealGrant& grant);
  bool is_granted() const { return client_ != nullptr; }
  net::DataClient& client() { return *client_; }
  const net::Endpoint& endpoint() const { return client_->endpoint(); }
  std::optional<Instant> due_at() const { return client_->due_at(); }

  enum class Outcome : uint8_t {
    kNothing,  // no chunk was waiting
    kPiece,
    kFault,  // the link cannot continue; `fault()` returns the reason
  };
  // Receives the next chunk. `is_awaited` returns whether a batch is still awaited.
  template <typename IsAwaited>
  Outcome take_piece(loader::BatchMemory& memory, const IsAwaited& is_awaited) {
    switch (client_->try_receive()) {
      case net::DataClient::Outcome::kNothing: return Outcome::kNothing;
      case net::DataClient::Outcome::kFault: return fail(client_->fault());
      case net::DataClient::Outcome::kPiece: break;
    }
    return keep_piece(memory, is_awaited(client_->piece().head.key));
  }
  const std::string& fault() const { return fault_; }

  // Call when the batch is no longer awaited.
  void forget(wire::BatchKey key) { incoming_.erase(key); }
  // Whether all chunks of the batch have arrived.
  bool has_whole(wire::BatchKey key) const;
  // Returns the batch, once.
  std::optional<loader::IncomingBatch> take_whole(wire::BatchKey key);

 private:
  Outcome keep_piece(loader::BatchMemory& memory, bool is_awaited);
  Outcome fail(std::string fault);

  const net::LinkName name_;
  wire::SealOffer offer_;  // until the grant
  std::unique_ptr<net::DataClient> client_;
  std::map<wire::BatchKey, loader::IncomingBatch> incoming_;
  std::string fault_;
  std::vector<std::byte> unwanted_;  // decrypted chunks of batches that are no longer awaited
};

// A trainer's connections to one pool worker: one for control, and one for the chunks of the link in force. Confined to
// the I/O thread.
class WorkerLink {
 public:
  // `tag` identifies its socket in the ready set.
  WorkerLink(net::Endpoint endpoint, std::unique_ptr<net::ClientSocket> socket, uint64_t tag)
      : endpoint_(std::move(endpoint)), socket_(std::move(socket)), tag_(tag), opened_at_(clock_now()) {}

  const net::Endpoint& endpoint() const { return endpoint_; }
  net::ClientSocket& socket() { return *socket_; }
  // For a link that is about to be dropped.
  std::unique_ptr<net::ClientSocket> take_socket() { return std::move(socket_); }
  uint64_t tag() const { return tag_; }
  Instant opened_at() const { return opened_at_; }

  // Whether one of its sockets connects to this host.
  bool is_at(const std::string& host) const;

  // The time at which it must be served even if no message has arrived.
  std::optional<Instant> due_at() const;

  // Starts a link: the state of the previous one is discarded.
  void begin_link(const net::LinkName& name, const wire::SealOffer& offer);
  void end_link();
  // The data link in force; nullopt without one.
  std::optional<DataLink>& data() { return data_; }
  // The memory that the worker passes on the link in force, if it hands batches over as slabs.
  std::optional<loader::HandedOverMemory>& passed() { return passed_; }

  // Messages of the link wait behind an answer whose chunks have not arrived yet, so that all messages are processed in
  // the order in which the worker sent them.
  bool has_waiting() const { return !waiting_.empty(); }
  net::ReceivedPart& first_waiting() { return waiting_.front(); }
  void drop_first_waiting() { waiting_.pop_front(); }
  // Returns false if more messages wait than any correct worker sends.
  [[nodiscard]] bool add_waiting(net::ReceivedPart part);

  // Sends a chunk of a blob, or reports that there is none. A lost chunk is requested again.
  void hand_out(const wire::BlobRequest& request, const std::shared_ptr<const std::string>& blob);

  // libzmq has given up; the next attempt is due at this time.
  std::optional<Instant> reconnect_at;
  bool is_problem_reported = false;    // the reason was reported to the user
  bool is_fault_reported = false;      // it was reported that a chunk did not arrive as sent
  bool is_refused = false;             // the last greetings were answered with a refusal, which the worker may revoke
  bool is_handover_given_up = false;   // passed memory could not be used: batches are sent in chunks
  bool has_responded = false;          // the worker has sent a message, over this connection or an earlier one
  std::optional<Instant> pinged_at{};  // while a ping is unanswered
  // Set while the worker has granted chunks and their connection is not established.
  std::optional<Instant> data_missed_at;
  uint64_t data_tag = 0;  // the chunk socket's tag in the ready set; 0 without a socket

 private:
  const net::Endpoint endpoint_;
  std::unique_ptr<net::ClientSocket> socket_;
  const uint64_t tag_;
  const Instant opened_at_;
  std::optional<DataLink> data_;
  std::optional<loader::HandedOverMemory> passed_;
  std::deque<net::ReceivedPart> waiting_;
};

// Beyond this number, the oldest resting connection is closed without a goodbye.
constexpr size_t kRestingCountMax = 64;
// Maximum rest: no worker keeps a process longer for an absent trainer (server/job_host.h).
constexpr Duration kRestMax = std::chrono::seconds(300);

// A trainer's connections to a pool's workers, and the selection of those to serve: links whose socket has a message,
// and links whose time is due. So the cost of waking the I/O thread does not grow with the pool. Confined to the I/O
// thread.
class WorkerLinks {
 public:
  explicit WorkerLinks(net::ReadySet& ready_set) : ready_set_(ready_set) {}
  WorkerLinks(const WorkerLinks&) = delete;
  WorkerLinks& operator=(const WorkerLinks&) = delete;
  ~WorkerLinks();

  // Replaces the worker's link, if it has one.
  Result<void> open(uint64_t worker_id, const net::Endpoint& endpoint, std::unique_ptr<net::ClientSocket> socket);
  // Sent messages have up to `linger` to leave.
  void close(uint64_t worker_id, std::chrono::milliseconds linger);
  // The worker keeps this trainer's job process, although it works for another trainer. So the connection stays,
  // unused, until forget_resting() or the destructor, which sends `goodbye` to the worker.
  void rest(uint64_t worker_id, std::vector<std::byte> goodbye, Instant now);
  // Closes the worker's resting connection: the worker has welcomed this trainer again, over another one.
  void forget_resting(uint64_t worker_id);
  // Closes the connections that have rested since `instant` or longer, without a goodbye.
  void end_rest(Instant instant);
  WorkerLink* find(uint64_t worker_id);  // nullptr if there is none

  // The workers whose chunks have been unavailable since `instant` or longer.
  std::vector<uint64_t> without_data_since(Instant instant) const;
  // The workers that have sent no message although their links were opened before `instant`, except those whose failure
  // is known.
  std::vector<uint64_t> silent_since(Instant instant) const;

  // Renews the connection to the worker, if there is one.
  void renew(uint64_t worker_id);

  // See WorkerLink::begin_link and end_link, for a worker that has a link.
  void begin_link(uint64_t worker_id, const net::LinkName& name, const wire::SealOffer& offer);
  void end_link(uint64_t worker_id);
  // See DataLink::connect, for the link that was started last.
  Result<void> connect_data(uint64_t worker_id, net::SocketContext& context, net::Resolver& resolver,
                            const wire::SealGrant& grant);

  // A message that cannot be sent is dropped.
  void send(uint64_t worker_id, std::span<const std::byte> message);

  // Marks both of its sockets as about to be used, regardless of which one the set reported.
  void mark_used(const WorkerLink& link);
  // Notes that the set has reported this tag, which may not be a link's.
  void note_ready(uint64_t tag);
  // Call when the lookup of this host's address has finished, with or without a result.
  void note_looked_up(const std::string& host);
  // Returns the workers whose links must be served, each once.
  std::set<uint64_t> take_ready(Instant now);
  // Call after the link was served.
  void note_served(uint64_t worker_id);
  // The time at which take_ready() returns a link even if no message has arrived.
  std::optional<Instant> due_at() const;

 private:
  struct Resting {
    uint64_t worker_id;
    std::unique_ptr<net::ClientSocket> socket;
    std::vector<std::byte> goodbye;
    Instant since;
  };

  void drop(uint64_t worker_id);
  void drop_data(WorkerLink& link);

  net::ReadySet& ready_set_;
  std::map<uint64_t, WorkerLink> links_;
  std::map<uint64_t, uint64_t> worker_of_;  // by tag
  std::set<uint64_t> ready_;                // workers
  std::map<uint64_t, Instant> due_at_;      // of the few workers that have a timer
  std::deque<Resting> resting_;             // the oldest first
};

}  // namespace penstock::pool_client
