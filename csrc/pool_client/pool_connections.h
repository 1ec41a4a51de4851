// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connections to a pool's controller and workers, and the wait until one of them must be served. They are
// opened and closed here; AnswerReceiver reads the workers' messages and chunks.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "loader/batch_memory.h"
#include "loader/counters.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "net/socket.h"
#include "pool_client/controller_link.h"
#include "pool_client/pool_directory.h"
#include "pool_client/pool_io_options.h"
#include "pool_client/worker_links.h"
#include "wire/pool_record.h"

namespace penstock::pool_client {

// The pause before a worker is connected to again, after a refusal that is final for libzmq, or without a descriptor.
constexpr auto kReconnectPause = std::chrono::milliseconds(2000);

// Owned by PoolIo, which calls open() when its thread starts and close() when it ends; the other calls are allowed in
// between. Confined to the I/O thread, except where a comment states otherwise.
class PoolConnections {
 public:
  PoolConnections(const PoolIoOptions& options, const net::RunId& run, PoolDirectory directory);

  // Prepares for connections, without making any.
  Result<void> open();
  // Closes all connections. Sockets are destroyed on the thread that made them.
  void close();

  // Sleeps until a connection must be served, `due` has come or `wake_fd` is readable: see EventLoop::Handler::wait.
  Result<bool> wait(int wake_fd, bool may_sleep, std::optional<Instant> due);

  // For options with a controller. Call it once.
  Result<void> connect_to_controller();
  // nullptr before connect_to_controller().
  ControllerLink* controller() { return controller_.get(); }
  // The controller if it must be served in this turn, else nullptr.
  ControllerLink* take_ready_controller(Instant now);
  // The controller's address, for messages; empty without one.
  std::string controller_text() const { return options_.controller ? options_.controller->text() : ""; }

  PoolDirectory& directory() { return directory_; }
  WorkerLinks& links() { return *links_; }
  const net::RunId& run() const { return run_; }
  // The id of this run for a worker.
  uint64_t run_id_with(uint64_t worker_id) const { return directory_.is_own(worker_id) ? own_workers_run_ : run_.id; }

  // Connects to a worker of the directory, whose place has this endpoint. After a failure due_again() returns it.
  Result<void> connect(uint64_t worker_id, const PoolDirectory::Place& place, const net::Endpoint& endpoint);
  // Call before another attempt, and when the worker is no longer used.
  void forget_failure(uint64_t worker_id) { connect_again_at_.erase(worker_id); }
  // Returns the workers that could not be connected to and are due for another attempt.
  std::vector<uint64_t> due_again(Instant now) const;

  // Starts the link of this number with a worker that is connected to.
  void begin_link(uint64_t worker_id, uint32_t number, const wire::SealOffer& offer);
  // Connects to the memory of a worker on this machine, if it hands over its batches as slabs, for the link that starts
  // now. The worker looks for this connection when it receives the hello, so it must be made before. After an error the
  // worker sends its batches in chunks. `arenas` counts the arenas that are mapped.
  Result<void> connect_handover(uint64_t worker_id, uint32_t number, loader::Counter& arenas);
  // See DataLink::connect, for the link that was started last.
  Result<void> connect_data(uint64_t worker_id, const wire::SealGrant& grant);

  // Call before this process forks: see loader::ArenaViews. For any thread.
  void retire_held() { passed_views_.retire_held(); }

 private:
  void take_lookups();

  const PoolIoOptions& options_;
  const net::RunId& run_;
  uint64_t own_workers_run_ = 0;     // this run's id for its own workers, which may see a different key
  loader::ArenaViews passed_views_;  // of own workers

  std::unique_ptr<net::SocketContext> context_;
  std::unique_ptr<net::ReadySet> ready_set_;
  uint64_t wake_tag_ = 0;  // 0: the loop's descriptor is not in the set yet
  std::unique_ptr<net::Resolver> resolver_;
  uint64_t resolver_tag_ = 0;
  std::unique_ptr<ControllerLink> controller_;
  uint64_t controller_tag_ = 0;
  bool is_controller_ready_ = false;
  PoolDirectory directory_;
  std::unique_ptr<WorkerLinks> links_;
  std::map<uint64_t, Instant> connect_again_at_;  // workers for which no socket could be opened
};

}  // namespace penstock::pool_client
