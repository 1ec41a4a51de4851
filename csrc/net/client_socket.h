// SPDX-License-Identifier: Apache-2.0
#pragma once
// The connecting side of a pool's connections. A client has one server, whose key it knows. It connects again by itself
// when the connection is lost. Messages on their way are lost then too, and the protocol above asks again.
//
// Of a server that goes by the key of a role there may be two, while the keys of the pool are rotated. A client takes
// the newer one first. Where the server does not know it, or does not answer, the client tries the other one, and has
// the folder of its keys read again, since the server may have been started with keys that are newer than the client.

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/instant.h"
#include "base/result.h"
#include "net/connection_monitor.h"
#include "net/endpoint.h"
#include "net/key_folder.h"
#include "net/key_ring.h"
#include "net/keys.h"
#include "net/resolver.h"
#include "net/tcp_socket.h"

namespace penstock::net {

struct ClientSocketOptions {
  wire::MessageLimits limits = {};
  std::chrono::milliseconds handshake_interval{5000};
};

struct ClientReceipt {
  std::vector<ReceivedPart> parts;
  std::string offence;  // set when a server broke a rule, and names it. There are no parts then
};

// How long a goodbye may take to leave.
inline constexpr std::chrono::milliseconds kFarewellTime{500};

// The keys that a server may have which goes by that of a role.
struct ServerKeys {
  Role role = Role::kController;
  std::vector<PublicKey> keys{};
  size_t place = 0;                         // in them, of the one that is tried or was right
  size_t refused_count = 0;                 // of them, one after the other
  std::chrono::milliseconds pause{};        // before all are tried once more
  std::optional<KeyFolderReader> reader{};  // none where the keys are in no folder
};

// Confined to the thread that made it.
class ClientSocket {
 public:
  // Begins to connect to the server at `endpoint` whose key is `server_key`. The server need not be there yet.
  // `resolver` looks its name up, if it is one, and outlives the client. Until it has, the client waits; once
  // Resolver::take_done() names the host, `try_event` goes on. A name that is not known is looked up again later on.
  static Result<std::unique_ptr<ClientSocket>> connect(SocketContext& context, Resolver& resolver,
                                                       const Endpoint& endpoint, const KeyPair& own,
                                                       const PublicKey& server_key,
                                                       const ClientSocketOptions& options = {});
  // The same for the server that goes by the key of this role, in either of its generations.
  static Result<std::unique_ptr<ClientSocket>> connect(SocketContext& context, Resolver& resolver,
                                                       const Endpoint& endpoint, const KeyRing& keys, Role server_role,
                                                       const ClientSocketOptions& options = {});
  // The same for a server that lets in whoever shows it `ticket`.
  static Result<std::unique_ptr<ClientSocket>> connect(SocketContext& context, Resolver& resolver,
                                                       const Endpoint& endpoint, const Ticket& ticket,
                                                       const ClientSocketOptions& options = {});

  // For `connect`.
  ClientSocket(std::unique_ptr<ConnectionMonitor> monitor, std::unique_ptr<TcpSocket> socket, Resolver& resolver,
               Endpoint endpoint)
      : resolver_(resolver),
        socket_(std::move(socket)),
        monitor_(std::move(monitor)),
        endpoint_(std::move(endpoint)),
        is_name_(!address_of_number(endpoint_.host)) {}
  ClientSocket(const ClientSocket&) = delete;
  ClientSocket& operator=(const ClientSocket&) = delete;

  const Endpoint& endpoint() const { return endpoint_; }

  // The events of the connection since the last call, in order; none if there was none. The reason of a refusal names
  // the server and the remedy. After a final refusal nothing happens any more unless `reconnect` is called.
  std::optional<ConnectionEvent> try_event();

  // The time at which `try_event` must be called though nothing is readable: to connect again after a connection that
  // libzmq may have given up, or after one for which the server had another key, or to see whether a host that does not
  // answer has another address by now.
  std::optional<Instant> due_at() const;

  // Whether the server is connected, by the last event.
  bool is_connected() const { return is_connected_; }

  // Why no address of the host is known, in the system's words, if the last lookup found none; else empty.
  const std::string& lookup_failure() const { return lookup_failure_; }

  // Drops the connection with its queued messages, and begins to connect anew, to the address that the host has now.
  Result<void> reconnect();
  // Calls reconnect() if there is a connection. A connection that cannot begin is tried again later on.
  void renew();

  // As TcpSocket::send. kClosed: the server is not connected, or reads so slowly that there is no room.
  Result<void> send(std::span<OutgoingPart> parts) { return socket_->send({}, parts); }
  Result<void> send(std::span<const std::byte> only_part);

  // Receives into `receipt`, dropping its former content. Returns false when no message is waiting.
  Result<bool> try_receive(ClientReceipt& receipt);

  // As TcpSocket::set_linger, such as by kFarewellTime. The socket's context waits that long at most when it is
  // destroyed.
  void set_linger(std::chrono::milliseconds time) { socket_->set_linger(time); }

  // Readable when a message is waiting, or an event.
  std::array<Waitable, 2> waitables() const { return {socket_->waitable(), monitor_->waitable()}; }

 private:
  static Result<std::unique_ptr<ClientSocket>> begin_with(SocketContext& context, Resolver& resolver,
                                                          const Endpoint& endpoint,
                                                          Result<std::unique_ptr<TcpSocket>> socket);
  Result<void> begin();
  // Whether a host that is not connected has another address than the one that libzmq tries.
  bool has_moved();
  // After a refusal: goes on with another key of the server's, if there is one. True unless each has been refused now:
  // that is for the user to know.
  bool try_other_key();

  Resolver& resolver_;
  std::unique_ptr<TcpSocket> socket_;
  std::unique_ptr<ConnectionMonitor> monitor_;
  const Endpoint endpoint_;
  const bool is_name_;
  bool awaits_address_ = false;  // the host is being looked up
  Instant looked_up_at_{};       // the last time
  std::string lookup_failure_;
  std::string address_;  // that libzmq connects to; empty while it does not
  std::optional<ServerKeys> server_keys_;
  std::optional<Instant> begin_at_;  // while no connection is to begin yet
  bool is_connected_ = false;
  std::optional<Instant> lost_at_;  // while nothing was heard since
  ReceivedMessage message_;
};

}  // namespace penstock::net
