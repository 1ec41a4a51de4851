// SPDX-License-Identifier: Apache-2.0
#pragma once
// The program `penstock-server`: the process of a pool's worker that holds its keys and sockets. It starts a warm
// process, waits until that can fork, and serves until it is drained or its parent is gone.

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/server_addresses.h"

namespace penstock::server {

// What `penstock worker` tells it on its command line.
struct ServerOrders {
  ServerAddresses addresses{};
  std::string name{};      // as PoolServerOptions
  std::string powercap{};  // as PoolServerOptions
  uint64_t arena_bytes = 0;
  uint64_t blob_bytes_max = 0;
  double patience_s = 60;
  double grace_s = 30;
  pid_t parent_pid = 0;
  int exit_fd = -1;
  bool is_quiet = false;  // its log has trouble only
  std::vector<std::string> warm_command{};
};

// "--bind=tcp://...", and so on for each field but the last, whose words follow "--". kMalformed for another option,
// and for a value that is not of its kind.
Result<ServerOrders> parse_server_orders(std::span<const char* const> arguments);

// Returns the exit code, which means nothing to the supervisor: an ExitPipe tells it why this process ends.
int server_program(int argument_count, const char* const* arguments);

}  // namespace penstock::server
