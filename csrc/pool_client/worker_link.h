// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connections to one pool worker: one for control, and one for the chunks of the link in force.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/instant.h"
#include "base/live_clock.h"
#include "base/result.h"
#include "loader/passed_memory.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/message_part.h"
#include "pool_client/data_link.h"
#include "wire/blob_record.h"

namespace penstock::pool_client {

// Confined to the I/O thread.
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
  void hand_out(const wire::BlobWish& wish, const std::shared_ptr<const std::string>& blob);

  // libzmq has given up; the next attempt is due at this time.
  std::optional<Instant> reconnect_at;
  bool is_trouble_told = false;        // the reason was reported to the user
  bool is_fault_told = false;          // it was reported that a chunk did not arrive as sent
  bool is_refused = false;             // the last greetings were answered with a refusal, which the worker may revoke
  bool is_handover_given_up = false;   // passed memory could not be used: batches are sent in chunks
  bool has_spoken = false;             // the worker has sent a message, over this connection or an earlier one
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

}  // namespace penstock::pool_client
