// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connections to the workers of a pool, and which of them to serve: those whose socket has a message, and
// those whose time has come. So the cost of a wake of the I/O thread does not grow with the pool.

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

#include "base/instant.h"
#include "base/result.h"
#include "loader/worker_link.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/ready_set.h"

namespace penstock::loader {

// Of more resting connections the oldest is closed without a goodbye.
constexpr size_t kRestingCountMax = 64;
// For how long one rests: no worker keeps a process longer for a trainer that is away (server/job_host.h).
constexpr Duration kRestMax = std::chrono::seconds(300);

// Confined to the I/O thread.
class WorkerLinks {
 public:
  explicit WorkerLinks(net::ReadySet& ready_set) : ready_set_(ready_set) {}
  WorkerLinks(const WorkerLinks&) = delete;
  WorkerLinks& operator=(const WorkerLinks&) = delete;
  ~WorkerLinks();

  // Takes the place of the worker's link, if it has one.
  Result<void> open(uint64_t worker_id, const net::Endpoint& endpoint, std::unique_ptr<net::ClientSocket> socket);
  // Messages that were sent may take `linger` to leave.
  void close(uint64_t worker_id, std::chrono::milliseconds linger);
  // The worker keeps the process of this trainer's job for it, though it works for another. So the connection stays,
  // unused, until forget_resting() or until the end: the worker hears `goodbye` then.
  void rest(uint64_t worker_id, std::vector<std::byte> goodbye, Instant now);
  // The worker has welcomed this trainer again, over another connection.
  void forget_resting(uint64_t worker_id);
  // Closes the connections that have rested since `instant` or longer, without a goodbye.
  void end_rest(Instant instant);
  WorkerLink* find(uint64_t worker_id);  // nullptr if there is none

  // The workers whose pieces could not be had since `instant` or longer.
  std::vector<uint64_t> without_data_since(Instant instant) const;
  // The workers that have said nothing though their links were opened before `instant`, except those whose failure is
  // known.
  std::vector<uint64_t> silent_since(Instant instant) const;

  // Has the connection to the worker made anew, if there is one.
  void renew(uint64_t worker_id);

  // As WorkerLink::begin_link and end_link, for a worker that has a link.
  void begin_link(uint64_t worker_id, const net::LinkName& name, const wire::SealOffer& offer);
  void end_link(uint64_t worker_id);
  // As DataLink::connect, of the link that began last.
  Result<void> connect_data(uint64_t worker_id, net::SocketContext& context, net::Resolver& resolver,
                            const wire::SealGrant& grant);

  // A message that does not get through is dropped.
  void send(uint64_t worker_id, std::span<const std::byte> message);

  // Both of its sockets are about to be used, whichever of them the set told of.
  void mark_used(const WorkerLink& link);
  // The set tells of this tag, of a link or not.
  void note_ready(uint64_t tag);
  // The address of this host has been looked up, or it has none.
  void note_looked_up(const std::string& host);
  // The workers whose links must be served, once.
  std::set<uint64_t> take_ready(Instant now);
  // The link was served.
  void note_served(uint64_t worker_id);
  // When take_ready() has a link though nothing has come.
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
  std::map<uint64_t, Instant> due_at_;      // of the few workers that are in trouble
  std::deque<Resting> resting_;             // the oldest first
};

}  // namespace penstock::loader
