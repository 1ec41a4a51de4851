// SPDX-License-Identifier: Apache-2.0
#pragma once
// TcpSocket, a ZeroMQ socket over TCP, for both sides of a connection between hosts: its options, and sending and
// receiving messages within limits. With CURVE it encrypts the messages. With a ticket, which is ZeroMQ's PLAIN, it
// only rejects strangers, and the messages are sealed separately (seal.h). The rest of penstock uses ServerSocket,
// ClientSocket and the data sockets.
//
// Neither direction copies a payload: a sent part stays in place until ZeroMQ has read it, and a received part stays in
// ZeroMQ's memory.

#include <zmq.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/result.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "net/seal.h"
#include "net/socket.h"
#include "net/stranger_guard.h"
#include "wire/control_record.h"
#include "wire/message.h"

namespace penstock::net {

// One part to send. Without `release` the bytes are copied. With it they are not: they must stay unchanged until
// `release` is called, which happens exactly once, on any thread, even if the message could not be sent.
struct OutgoingPart {
  std::span<const std::byte> bytes;
  std::function<void()> release;
};

// One received part. Its bytes have no guaranteed alignment. Thread-compatible.
struct ReceivedPart {
  std::span<const std::byte> bytes() const { return {message.data<std::byte>(), message.size()}; }

  zmq::message_t message;
};

// An error unless this libzmq has CURVE and the fixes of 4.3.3: earlier, anyone who could reach the port could stop a
// server from serving (CVE-2020-15166), or write past a buffer (CVE-2021-20235).
struct ZmqFacts {
  int major = 0;
  int minor = 0;
  int patch = 0;
  bool has_curve = false;

  static ZmqFacts of_this_process();
};
Result<void> check_zmq(const ZmqFacts& facts);

enum class ReceiveOutcome : uint8_t {
  kNothing,  // no message was waiting
  kMessage,
  kOffence,  // a message above a limit, or with a claim that no peer of ours makes; its parts are dropped
};

struct ReceivedMessage {
  std::string routing_id;  // of a router: the peer's, assigned by this side's libzmq
  std::string user_id;     // of a router: ZAP's User-Id, as assigned by the authenticator
  std::string address;     // of a router: the numeric address of the peer's host
  std::vector<ReceivedPart> parts;
  std::string offence;  // the reason
};

// Confined to the thread that created it.
class TcpSocket {
 public:
  struct ServerSetup {
    const KeyPair& own;
    const std::string& zap_domain;
    std::chrono::milliseconds handshake_interval;
  };
  struct ClientSetup {
    const KeyPair& own;
    const PublicKey& server_key;
    std::chrono::milliseconds handshake_interval;
  };
  static Result<std::unique_ptr<TcpSocket>> open_server(SocketContext& context, const ServerSetup& setup,
                                                        const wire::MessageLimits& limits);
  static Result<std::unique_ptr<TcpSocket>> open_client(SocketContext& context, const ClientSetup& setup,
                                                        const wire::MessageLimits& limits);

  // Without CURVE: the domain's authenticator admits the holder of its ticket.
  struct TicketServerSetup {
    const std::string& zap_domain;
    std::chrono::milliseconds handshake_interval;
  };
  struct TicketClientSetup {
    const Ticket& ticket;
    std::chrono::milliseconds handshake_interval;
  };
  static Result<std::unique_ptr<TcpSocket>> open_ticket_server(SocketContext& context, const TicketServerSetup& setup,
                                                               const wire::MessageLimits& limits);
  static Result<std::unique_ptr<TcpSocket>> open_ticket_client(SocketContext& context, const TicketClientSetup& setup,
                                                               const wire::MessageLimits& limits);

  // For the `open` functions.
  TcpSocket(SocketContext& context, zmq::socket_t socket, bool is_router, const wire::MessageLimits& limits)
      : context_(context), socket_(std::move(socket)), is_router_(is_router), limits_(limits) {}
  TcpSocket(const TcpSocket&) = delete;
  TcpSocket& operator=(const TcpSocket&) = delete;
  ~TcpSocket() = default;

  // Listens on `endpoint`, and returns the address and port that are actually bound. An address that other machines can
  // reach is refused unless the pool's keys were given. From then on connections are bounded, both before and after
  // they have shown a key (stranger_guard.h), within the share in `use`. Can block during a name lookup.
  Result<Endpoint> listen(const Endpoint& endpoint, KeyOrigin origin, const PortUse& use = {});
  // The address is in ZeroMQ's format.
  Result<void> connect(const std::string& address, bool is_ipv6);
  void disconnect(const std::string& address);
  // Sets the server key for a client's next connections.
  Result<void> expect_server(const PublicKey& key);

  // Makes libzmq process opened and closed connections. By itself it checks only occasionally, so a message sent
  // shortly after could otherwise be queued for a closed connection and be lost.
  void settle();

  // Sends one message without blocking. `routing_id` is the peer's for a router, and empty for a client. kClosed if the
  // peer is gone or has no room; kTooLarge, without sending, above a limit. The parts' `release` is moved from.
  Result<void> send(std::string_view routing_id, std::span<OutgoingPart> parts);

  // Fills `message` unless no message is waiting. Drops its previous parts.
  Result<ReceiveOutcome> try_receive(ReceivedMessage& message);

  // How long sent messages may still take to be transmitted after destruction: no time unless this is called.
  void set_linger(std::chrono::milliseconds time);

  Waitable waitable() { return Waitable(socket_); }

  // For this room's files that call ZeroMQ.
  zmq::socket_t& zmq() { return socket_; }

 private:
  Result<void> check_sizes(std::span<const OutgoingPart> parts) const;
  // Reports the sender of a message's connection to the guard; libzmq identifies it only with the message.
  void note_holder(int fd, const ReceivedMessage& message);
  // The violation by a message of which this much was received; empty if there is none.
  std::string offence_of(size_t part_count, uint64_t message_bytes) const;

  SocketContext& context_;
  zmq::socket_t socket_;
  const bool is_router_;
  const wire::MessageLimits limits_;
  std::unique_ptr<StrangerGuard> guard_;  // of a listening socket; ends before it
  // By libzmq's descriptor: the routing id of the connection that last sent a message with this number.
  std::unordered_map<int, std::string> noted_;
};

// The message limits of a connection with a controller. Both sides must use the same.
inline wire::MessageLimits control_limits() {
  return {.part_bytes_max = wire::kControlBytesMax, .message_bytes_max = wire::kControlBytesMax};
}

}  // namespace penstock::net
