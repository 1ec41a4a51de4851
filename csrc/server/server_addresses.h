// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a worker of a pool listens, for whom and with which keys, as text: what a command line or Python gives.

#include <optional>
#include <string>

#include "base/result.h"
#include "server/pool_server_io.h"

namespace penstock::server {

// The addresses of PoolServerOptions. Without a folder of keys, those that this user's processes share.
struct ServerAddresses {
  std::string bind;
  std::optional<std::string> controller = {};
  std::optional<std::string> advertised = {};
  std::optional<std::string> data_bind = {};
  std::optional<std::string> data_advertised = {};
  std::optional<std::string> key_folder = {};
};

// The options of a server there; all others are at their defaults. Errors are those of net::Endpoint::parse() and
// net::load_keys().
Result<PoolServerOptions> options_at(const ServerAddresses& addresses);

}  // namespace penstock::server
