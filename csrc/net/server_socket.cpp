// SPDX-License-Identifier: Apache-2.0
#include "net/server_socket.h"

#include <optional>
#include <utility>

#include "net/key_folder.h"

namespace penstock::net {
namespace {

AllowedKeys allowed_keys(const PublicKeys& keys, std::span<const Role> roles) {
  AllowedKeys allowed;
  for (const Role role : roles) {
    for (const PublicKey& key : keys.generations(role)) allowed.emplace(key, role);
    for (const auto& [key, name] : keys.named(role)) allowed.emplace(key, role);
  }
  return allowed;
}

KeyNames all_names(const PublicKeys& keys) {
  KeyNames names = keys.users;
  names.insert(keys.machines.begin(), keys.machines.end());
  return names;
}

// Checks the folder of the keys, if they were read from one.
Authenticator::Look look_at(const KeyRing& keys, const std::vector<Role>& roles) {
  if (keys.folder().empty()) return {};
  // Shared by the copies of the function.
  auto watch = std::make_shared<KeyFolderWatch>(keys.folder(), keys.own_role(), keys.public_keys());
  return [watch, roles]() -> Result<std::optional<Authenticator::Change>> {
    auto change = watch->look();
    if (!change) return change.error();
    if (!change.value()) return std::optional<Authenticator::Change>();
    const PublicKeys& changed = change.value()->keys;
    return std::optional(Authenticator::Change{.keys = allowed_keys(changed, roles),
                                               .names = all_names(changed),
                                               .notice = std::move(change.value()->notice)});
  };
}

}  // namespace

Result<std::unique_ptr<ServerSocket>> ServerSocket::bind(SocketContext& context, Authenticator& authenticator,
                                                         const Endpoint& endpoint, const KeyRing& keys,
                                                         const ServerSocketOptions& options) {
  auto domain = authenticator.make_domain(allowed_keys(keys.public_keys(), options.allowed_roles),
                                          all_names(keys.public_keys()), look_at(keys, options.allowed_roles));
  auto socket = TcpSocket::open_server(
      context, {.own = keys.own(), .zap_domain = domain->name(), .handshake_interval = options.handshake_interval},
      options.limits);
  if (!socket) return socket.error();
  auto bound =
      socket.value()->listen(endpoint, keys.origin(), {.sharer_count = options.sharer_count, .holders = options.room});
  if (!bound) return bound.error();
  return std::make_unique<ServerSocket>(std::move(domain), std::move(socket).value(), std::move(bound).value());
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
    // No client passes the handshake without an identity, so a message without one has no valid sender and is ignored.
    if (!identity) continue;
    auto holder = domain_->holder_of(*identity);
    if (!holder) {  // the key was admitted when it connected
      message_.parts.clear();
      message_.offence = "its key is no longer accepted";
    }
    receipt.peer = {.routing_id = std::move(message_.routing_id), .identity = *identity};
    receipt.peer.address = std::move(message_.address);
    if (holder) (identity->role == Role::kWorker ? receipt.peer.machine : receipt.peer.user) = *std::move(holder);
    receipt.parts = std::move(message_.parts);
    receipt.offence = std::move(message_.offence);
    return true;
  }
}

}  // namespace penstock::net
