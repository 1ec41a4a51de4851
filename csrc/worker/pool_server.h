// SPDX-License-Identifier: Apache-2.0
#pragma once
// A pool worker: takes requests of the trainer it is assigned to, allocates memory for batches, and sends finished
// batches in chunks. A separate thread communicates with trainers and the controller (server/pool_server_io.h); this
// class is its interface for the thread that makes batches.

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "base/result.h"
#include "server/pool_server_io.h"
#include "server/work_exchange.h"
#include "worker/batch_server.h"

namespace penstock::worker {

// The members that must outlive the base that takes work from them.
struct OwnExchange {
  server::WorkExchange exchange;
};

// Like its base: confined to the thread that makes batches.
class PoolServer : private OwnExchange, public BatchServer {
 public:
  // Listens, and starts to report to the controller, which may start later.
  static Result<std::unique_ptr<PoolServer>> start(server::PoolServerOptions options);

  // For `start`.
  PoolServer(server::PoolServerOptions options, const net::RunId& run);
  PoolServer(const PoolServer&) = delete;
  PoolServer& operator=(const PoolServer&) = delete;
  ~PoolServer();

  // For a unique_ptr that a forked child may inherit. The child has neither the thread nor the sockets, so it leaves
  // the object alone.
  struct Deleter {
    void operator()(PoolServer* server) const {
      if (server->owner_pid_ == ::getpid()) std::default_delete<PoolServer>()(server);
    }
  };
  using Handle = std::unique_ptr<PoolServer, Deleter>;

  uint64_t worker_id() const { return worker_id_; }
  const net::Endpoint& endpoint() const { return io_.endpoint(); }
  const std::string& advertised() const { return io_.advertised(); }
  const net::Endpoint& data_endpoint() const { return io_.data_endpoint(); }
  const std::string& data_advertised() const { return io_.data_advertised(); }
  int signal_fd() const { return io_.signal_fd(); }

  // Ends immediately.
  void close() { loop_.stop(); }

 private:
  const server::PoolServerOptions options_;
  const uint64_t worker_id_;
  const pid_t owner_pid_ = ::getpid();
  server::PoolServerIo io_;
  EventLoop loop_;
};

}  // namespace penstock::worker
