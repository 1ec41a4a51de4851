// SPDX-License-Identifier: Apache-2.0
#include "net/server_socket.h"

#include <utility>

namespace penstock::net {
namespace {

Result<void> check_reach(const Endpoint& endpoint, const HostAddress& address, KeyOrigin origin) {
  if (address.is_loopback || origin == KeyOrigin::kGiven) return {};
  return Error{Errc::kUnsupported,
               "listening at " + endpoint.text() + " is refused: other machines can reach " + address.number +
                   " and no keys were given, which decide who is let in; make keys with penstock keys DIR and name "
                   "their folder with --keys or PENSTOCK_KEYS, or listen at tcp://127.0.0.1"};
}

AllowedKeys allowed_keys(const KeyRing& keys, std::span<const Role> roles) {
  AllowedKeys allowed;
  for (const Role role : roles) allowed.emplace(keys.public_key(role), role);
  return allowed;
}

}  // namespace

Result<std::unique_ptr<ServerSocket>> ServerSocket::bind(SocketContext& context, Authenticator& authenticator,
                                                         const Endpoint& endpoint, const KeyRing& keys,
                                                         const ServerSocketOptions& options) {
  auto address = resolve_bind_address(endpoint);
  if (!address) return address.error();
  if (auto checked = check_reach(endpoint, address.value(), keys.origin()); !checked) return checked.error();
  auto domain = authenticator.make_domain(allowed_keys(keys, options.allowed_roles));
  auto socket = CurveSocket::open_server(
      context, {.own = keys.own(), .zap_domain = domain->name(), .handshake_interval = options.handshake_interval},
      options.limits);
  if (!socket) return socket.error();
  auto bound = socket.value()->bind(zmq_address(address.value(), endpoint.port), address.value().is_ipv6);
  if (!bound) return bound.error();
  auto real = Endpoint::parse(bound.value());
  PENSTOCK_ASSERT(real, "libzmq names its own endpoint ", bound.value());
  return std::make_unique<ServerSocket>(std::move(domain), std::move(socket).value(), std::move(real).value());
}

Result<void> ServerSocket::send(std::string_view routing_id, std::span<const std::byte> only_part) {
  OutgoingPart part{.bytes = only_part, .release = nullptr};
  return send(routing_id, std::span(&part, 1));
}

Result<bool> ServerSocket::try_receive(ServerReceipt& receipt) {
  for (;;) {
    auto received = socket_->try_receive(message_);
    if (!received) return received.error();
    if (received.value() == ReceiveOutcome::kNothing) {
      if (auto health = domain_->authenticator().health(); !health) return health.error();
      return false;
    }
    auto identity = PeerIdentity::parse(message_.user_id);
    // Nobody gets through the handshake without an identity; a message without one is nobody's and is not looked at.
    if (!identity) continue;
    receipt.peer = {.routing_id = std::move(message_.routing_id), .identity = *identity};
    receipt.parts = std::move(message_.parts);
    receipt.offence = std::move(message_.offence);
    return true;
  }
}

}  // namespace penstock::net
