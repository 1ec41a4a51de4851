// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connections to one worker of a pool: the one for control, and that for the pieces of the link in force.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/instant.h"
#include "base/live_clock.h"
#include "base/result.h"
#include "loader/data_link.h"
#include "loader/passed_memory.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/message_part.h"
#include "wire/blob_record.h"

namespace penstock::loader {

// Confined to the I/O thread.
class WorkerLink {
 public:
  // `tag` is that of its socket in the set that waits for it.
  WorkerLink(net::Endpoint endpoint, std::unique_ptr<net::ClientSocket> socket, uint64_t tag)
      : endpoint_(std::move(endpoint)), socket_(std::move(socket)), tag_(tag), opened_at_(clock_now()) {}

  const net::Endpoint& endpoint() const { return endpoint_; }
  net::ClientSocket& socket() { return *socket_; }
  // Of a link that is dropped now.
  std::unique_ptr<net::ClientSocket> take_socket() { return std::move(socket_); }
  uint64_t tag() const { return tag_; }
  Instant opened_at() const { return opened_at_; }

  // Whether one of its sockets connects to this host.
  bool is_at(const std::string& host) const;

  // The time at which it must be served though nothing has come.
  std::optional<Instant> due_at() const;

  // A link begins: nothing of the one before counts.
  void begin_link(const net::LinkName& name, const wire::SealOffer& offer);
  void end_link();
  // Of the link in force; nothing while there is none.
  std::optional<DataLink>& data() { return data_; }
  // The memory that the worker passes on the link in force, if it hands batches over as slabs.
  std::optional<HandedOverMemory>& passed() { return passed_; }

  // Messages of the link wait behind an answer whose pieces are not there yet, so that everything is taken in the order
  // in which the worker sent it.
  bool has_waiting() const { return !waiting_.empty(); }
  net::ReceivedPart& first_waiting() { return waiting_.front(); }
  void drop_first_waiting() { waiting_.pop_front(); }
  // False if there are more than any worker has reason to send.
  [[nodiscard]] bool add_waiting(net::ReceivedPart part);

  // Sends a piece of a blob, or says that there is none. A piece that does not get through is asked for again.
  void hand_out(const wire::BlobWish& wish, const std::shared_ptr<const std::string>& blob);

  // libzmq has given up; another try is due then.
  std::optional<Instant> reconnect_at;
  bool is_trouble_told = false;        // the user has been told the reason
  bool is_fault_told = false;          // that a piece did not come as it was sent
  bool is_refused = false;             // it has answered the last greetings with a refusal, which it may take back
  bool is_handover_given_up = false;   // memory that was passed could not be used: batches cross in pieces
  bool has_spoken = false;             // the worker has, over this connection or one before it
  std::optional<Instant> pinged_at{};  // while a ping is unanswered
  // While the worker has granted pieces, and their connection does not come about.
  std::optional<Instant> data_missed_at;
  uint64_t data_tag = 0;  // of the pieces' socket in the set that waits for it; 0 while there is none

 private:
  const net::Endpoint endpoint_;
  std::unique_ptr<net::ClientSocket> socket_;
  const uint64_t tag_;
  const Instant opened_at_;
  std::optional<DataLink> data_;
  std::optional<HandedOverMemory> passed_;
  std::deque<net::ReceivedPart> waiting_;
};

}  // namespace penstock::loader
