// SPDX-License-Identifier: Apache-2.0
#pragma once
// The connecting side of a pool's connections: ClientSocket, for messages, and DataClient, for the pieces of the
// batches of one link.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "net/endpoint.h"
#include "net/key_folder.h"
#include "net/keys.h"
#include "net/seal.h"
#include "net/socket.h"
#include "net/tcp_socket.h"
#include "wire/pool_record.h"

namespace penstock::net {

struct ClientSocketOptions {
  wire::MessageLimits limits = {};
  std::chrono::milliseconds handshake_interval{5000};
};

struct ClientReceipt {
  std::vector<ReceivedPart> parts;
  std::string offence;  // set, and without parts, if a server broke a rule; describes the violation
};

// How long a goodbye may take to be sent.
inline constexpr std::chrono::milliseconds kClosingLinger{500};

// The possible keys of a server that holds a role's key.
struct ServerKeys {
  Role role = Role::kController;
  std::vector<PublicKey> keys{};
  size_t place = 0;                         // in `keys`, of the key that is tried or was accepted
  size_t refused_count = 0;                 // keys refused in a row
  std::chrono::milliseconds pause{};        // before all keys are tried once more
  std::optional<KeyFolderReader> reader{};  // none if the keys are in no folder
};

// A client has one server, whose key it knows. It reconnects automatically when the connection is lost. Messages in
// transit are lost then too, and the protocol above requests them again.
//
// While the keys of the pool are rotated, a server that holds a role's key may have one of two keys. A client tries the
// newer one first. If the server does not know it, or does not answer, the client tries the other one, and rereads the
// folder of its keys, since the server may have been started with keys that are newer than the client.
//
// Confined to the thread that created it.
class ClientSocket {
 public:
  // Starts to connect to the server at `endpoint` whose key is `server_key`. The server need not be running yet.
  // `resolver` looks up the endpoint's host if it is a name, and must outlive the client. The client waits for the
  // lookup; once Resolver::take_done() returns the host, `try_event` continues. An unknown name is looked up again
  // later.
  static Result<std::unique_ptr<ClientSocket>> connect(SocketContext& context, Resolver& resolver,
                                                       const Endpoint& endpoint, const KeyPair& own,
                                                       const PublicKey& server_key,
                                                       const ClientSocketOptions& options = {});
  // The same for the server that holds the key of this role, in either of its generations.
  static Result<std::unique_ptr<ClientSocket>> connect(SocketContext& context, Resolver& resolver,
                                                       const Endpoint& endpoint, const KeyRing& keys, Role server_role,
                                                       const ClientSocketOptions& options = {});
  // The same for a server that admits the holder of `ticket`.
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

  // Returns the next event of the connection, in order, or none. The reason of a refusal names the server and the
  // remedy. After a final refusal no further events follow unless `reconnect` is called.
  std::optional<ConnectionEvent> try_event();

  // The time at which `try_event` must be called even if no socket is readable: to reconnect after a connection that
  // libzmq may have given up, or after one for which the server had another key, or to check whether a host that does
  // not answer has a new address.
  std::optional<Instant> due_at() const;

  // Whether the server is connected, according to the last event.
  bool is_connected() const { return is_connected_; }

  // Why no address of the host is known, as the system's message, if the last lookup found none; otherwise empty.
  const std::string& lookup_failure() const { return lookup_failure_; }

  // Drops the connection with its queued messages, and starts to reconnect, to the host's current address.
  Result<void> reconnect();
  // Calls reconnect() if there is a connection. If reconnecting fails, it is retried later.
  void renew();

  // As TcpSocket::send. kClosed if the server is not connected, or reads so slowly that there is no room.
  Result<void> send(std::span<OutgoingPart> parts) { return socket_->send({}, parts); }
  Result<void> send(std::span<const std::byte> only_part);

  // Receives into `receipt`, dropping its former content. Returns false if no message is waiting.
  Result<bool> try_receive(ClientReceipt& receipt);

  // As TcpSocket::set_linger, for example with kClosingLinger. The destructor of the socket's context waits at most
  // that long.
  void set_linger(std::chrono::milliseconds time) { socket_->set_linger(time); }

  // Readable when a message or an event is waiting.
  std::array<Waitable, 2> waitables() const { return {socket_->waitable(), monitor_->waitable()}; }

 private:
  static Result<std::unique_ptr<ClientSocket>> begin_with(SocketContext& context, Resolver& resolver,
                                                          const Endpoint& endpoint,
                                                          Result<std::unique_ptr<TcpSocket>> socket);
  Result<void> begin();
  // Whether the host is not connected and has another address than the one that libzmq tries.
  bool has_moved();
  // Continues after a refusal with another key of the server, if there is one. Returns true unless all keys have now
  // been refused, which must be reported to the user.
  bool try_other_key();

  Resolver& resolver_;
  std::unique_ptr<TcpSocket> socket_;
  std::unique_ptr<ConnectionMonitor> monitor_;
  const Endpoint endpoint_;
  const bool is_name_;
  bool awaits_address_ = false;  // the host is being looked up
  Instant looked_up_at_{};       // of the last lookup
  std::string lookup_failure_;
  std::string address_;  // that libzmq connects to; empty if it does not
  std::optional<ServerKeys> server_keys_;
  std::optional<Instant> begin_at_;  // set while connecting is postponed
  bool is_connected_ = false;
  std::optional<Instant> lost_at_;  // reset by the next event
  ReceivedMessage message_;
};

// The trainer's end of the connection that carries the pieces of one link's batches. It connects once: if the
// connection ends, the link has ended too, and the next link has a new client with new keys. Confined to the thread
// that created it.
class DataClient {
 public:
  // Starts to connect to the data port of the link `name`, whose keys are derived from the trainer's `offer` and the
  // worker's `grant`. kMalformed if the grant contains no endpoint. `resolver` must outlive the client.
  static Result<std::unique_ptr<DataClient>> connect(SocketContext& context, Resolver& resolver, const LinkName& name,
                                                     const wire::SealOffer& offer, const wire::SealGrant& grant);

  // For `connect`.
  DataClient(std::unique_ptr<ClientSocket> socket, Sealer sealer, Opener opener, const LinkName& name)
      : socket_(std::move(socket)), sealer_(std::move(sealer)), opener_(std::move(opener)), name_(name) {}

  const Endpoint& endpoint() const { return socket_->endpoint(); }
  const std::string& lookup_failure() const { return socket_->lookup_failure(); }

  enum class Outcome : uint8_t {
    kNothing,  // no message is waiting
    kPiece,
    kFault,  // a message that is not the link's next one as sealed by the worker; see `fault()`
  };
  // Receives the head of the next piece, of which only the order is checked; it is not authenticated before open().
  Outcome try_receive();
  const wire::SealedPiece& piece() const { return piece_; }
  // Decrypts the piece into `room`, which has the same length. Returns false if it is not as the worker sealed it; the
  // contents of `room` are then meaningless.
  [[nodiscard]] bool open(std::span<std::byte> room);
  const std::string& fault() const { return fault_; }

  // As ClientSocket::try_event. Joins the link once it is connected.
  std::optional<ConnectionEvent> try_event();
  std::optional<Instant> due_at() const { return socket_->due_at(); }
  std::array<Waitable, 2> waitables() const { return socket_->waitables(); }

 private:
  Outcome fail(std::string fault);
  void join();

  std::unique_ptr<ClientSocket> socket_;
  Sealer sealer_;
  Opener opener_;
  const LinkName name_;
  uint64_t counter_ = 0;  // of the last piece
  bool has_joined_ = false;
  ClientReceipt receipt_;
  wire::SealedPiece piece_;
  std::string fault_;
};

}  // namespace penstock::net
