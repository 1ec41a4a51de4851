// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connections to a pool's workers, and the selection of those to serve: links whose socket has a message,
// and links whose time is due. So the cost of waking the I/O thread does not grow with the pool.

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
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/ready_set.h"
#include "pool_client/worker_link.h"

namespace penstock::pool_client {

// Beyond this number, the oldest resting connection is closed without a goodbye.
constexpr size_t kRestingCountMax = 64;
// Maximum rest: no worker keeps a process longer for an absent trainer (server/job_host.h).
constexpr Duration kRestMax = std::chrono::seconds(300);

// Confined to the I/O thread.
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
