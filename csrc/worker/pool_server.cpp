// SPDX-License-Identifier: Apache-2.0
#include "worker/pool_server.h"

#include <utility>

#include "runtime/numeric_fingerprint.h"

namespace penstock::worker {

Result<std::unique_ptr<PoolServer>> PoolServer::start(server::PoolServerOptions options) {
  const net::RunId run = net::draw_run_id(options.keys.own().public_key());
  if (options.numerics == Numerics{}) options.numerics = runtime::numeric_fingerprint();
  auto server = std::make_unique<PoolServer>(std::move(options), run);
  if (auto started = server->loop_.start(); !started) return started.error();
  if (server->options_.supervisor) server->options_.supervisor(ExitWord::kServing, {});
  return server;
}

PoolServer::PoolServer(server::PoolServerOptions options, const net::RunId& run)
    // All handed-over slabs may be with batches that follow the one that the trainer waits for.
    : BatchServer(exchange,
                  {.arena_bytes = options.arena_bytes,
                   .prefetch_factor = kBatchesAhead + kKeptBatchesMax,
                   .waits = options.handover.empty()},
                  exchange.is_closed()),
      options_(std::move(options)),
      worker_id_(run.id),
      io_(options_, run, exchange, &pool()),
      loop_("pk_pool_server", "which communicates with trainers", io_) {
  exchange.set_waker(loop_.waker());
}

PoolServer::~PoolServer() { close(); }

}  // namespace penstock::worker
