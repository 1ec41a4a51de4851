// SPDX-License-Identifier: Apache-2.0
#pragma once
// The program `penstock-server`: the process that holds the keys and sockets of a pool's workers on one machine, each
// of which has an I/O thread in it. It starts one warm process for all, waits until that can fork, and serves until
// each worker is drained or its parent is gone.
//
// A worker that was told to leave, or that the controller refuses, closes alone, and the process ends with the last.
// The failure of one is that of the process: the others may fare no better, and its supervisor starts all again. That
// is so from the start: a port that is taken keeps all from serving.

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/server_addresses.h"

namespace penstock::server {

// What `penstock worker` or `penstock-worker` tells it on its command line.
struct ServerOrders {
  std::vector<ServerAddresses> workers{};  // whose controller and keys are the same
  std::string name{};                      // as PoolServerOptions
  std::string powercap{};                  // as PoolServerOptions
  uint64_t arena_bytes = 0;
  uint64_t blob_bytes_max = 0;
  double patience_s = 60;
  double grace_s = 30;
  pid_t parent_pid = 0;
  int exit_fd = -1;
  bool is_quiet = false;  // its log has trouble only
  // Of its lines and those of its jobs, in front of the worker's id.
  std::string log_name = "penstock worker";
  std::vector<std::string> warm_command{};
};

// "--bind=tcp://...", and so on for each field but the last, whose words follow "--". Each "--bind" begins a worker, to
// which the other addresses behind it belong; all else is for all workers, wherever it stands. kMalformed for another
// option, and for a value that is not of its kind.
Result<ServerOrders> parse_server_orders(std::span<const char* const> arguments);

// Returns the exit code, which means nothing to the supervisor: an ExitPipe tells it why this process ends.
int server_program(int argument_count, const char* const* arguments);

}  // namespace penstock::server
