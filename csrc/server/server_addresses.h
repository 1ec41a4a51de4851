// SPDX-License-Identifier: Apache-2.0
#pragma once
// The listening addresses, controller and keys of a pool worker, as text from a command line or from Python.

#include <optional>
#include <string>

#include "base/result.h"
#include "server/pool_server_io.h"

namespace penstock::server {

// The addresses of PoolServerOptions. Without a folder of keys, the keys shared by this user's processes.
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

}  // namespace penstock::server
