// SPDX-License-Identifier: Apache-2.0
#pragma once
// The program `penstock-server`: the process that holds the keys and sockets of the pool workers on one machine, and
// has an I/O thread for each. It starts one warm process for all of them, waits until that process can fork, and serves
// until each worker is drained or its parent is gone.
//
// A worker that is ordered to leave, or that the controller refuses, closes alone, and the process ends with the last
// worker. If one worker fails, the whole process fails: the other workers are likely to be affected too, and its
// supervisor restarts all of them. The same holds at the start: if one port is taken, none of the workers serves.

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/pool_server_io.h"

namespace penstock::server {

// The listening addresses, controller and keys of a pool worker, as text from a command line or from Python: the
// addresses of PoolServerOptions. Without a folder of keys, the keys shared by this user's processes.
struct ServerAddresses {
  std::string bind;
  std::optional<std::string> controller = {};
  std::optional<std::string> advertised = {};
  std::optional<std::string> data_bind = {};
  std::optional<std::string> data_advertised = {};
  std::optional<std::string> key_folder = {};
};

// The options of a server at these addresses; all others have their defaults. Errors as for
// net::Endpoint::parse() and net::load_keys().
Result<PoolServerOptions> options_at(const ServerAddresses& addresses);

// The command-line orders of `penstock worker` or `penstock-worker`.
struct ServerOrders {
  std::vector<ServerAddresses> workers{};  // they share their controller and keys
  std::string name{};                      // as PoolServerOptions
  std::string powercap{};                  // as PoolServerOptions
  // Describes the interpreter, the modules and the isolation of its jobs. Kept batches are shared with servers of the
  // same text; empty: with none.
  std::string installation{};
  uint64_t arena_bytes = 0;
  uint64_t blob_bytes_max = 0;
  double patience_s = 60;
  double grace_s = 30;
  pid_t parent_pid = 0;
  int exit_fd = -1;
  bool is_quiet = false;  // its log shows only problems
  // The prefix of its log lines and its jobs' log lines, before the worker's id.
  std::string log_name = "penstock worker";
  std::vector<std::string> warm_command{};
};

// "--bind=tcp://...", and so on for each field except the last, whose words follow "--". Each "--bind" introduces a
// worker, and the other addresses after it belong to that worker; all other options apply to all workers, in any
// position. kMalformed for an unknown option, and for a value of the wrong kind.
Result<ServerOrders> parse_server_orders(std::span<const char* const> arguments);

// Returns the exit code. The supervisor ignores it: an ExitPipe reports to it why this process ends.
int server_program(int argument_count, const char* const* arguments);

}  // namespace penstock::server
