// SPDX-License-Identifier: Apache-2.0
#include "server/server_addresses.h"

#include <utility>

#include "net/shared_key_folder.h"

namespace penstock::server {
namespace {

Result<std::optional<net::Endpoint>> parse(const std::optional<std::string>& text) {
  if (!text) return std::optional<net::Endpoint>();
  auto endpoint = net::Endpoint::parse(*text);
  if (!endpoint) return endpoint.error();
  return std::optional(std::move(endpoint).value());
}

}  // namespace

Result<PoolServerOptions> options_at(const ServerAddresses& addresses) {
  auto bind = net::Endpoint::parse(addresses.bind);
  if (!bind) return bind.error();
  auto controller = parse(addresses.controller);
  if (!controller) return controller.error();
  auto advertised = parse(addresses.advertised);
  if (!advertised) return advertised.error();
  auto data_bind = parse(addresses.data_bind);
  if (!data_bind) return data_bind.error();
  auto data_advertised = parse(addresses.data_advertised);
  if (!data_advertised) return data_advertised.error();
  auto keys = net::load_keys(addresses.key_folder, net::Role::kWorker);
  if (!keys) return keys.error();
  return PoolServerOptions{.bind = std::move(bind).value(),
                           .keys = std::move(keys).value(),
                           .controller = std::move(controller).value(),
                           .advertised = std::move(advertised).value(),
                           .data_bind = std::move(data_bind).value(),
                           .data_advertised = std::move(data_advertised).value()};
}

}  // namespace penstock::server
