// SPDX-License-Identifier: Apache-2.0
#pragma once
// A ZeroMQ socket over TCP, as both sides of a connection between hosts have it: its options, and sending and receiving
// under caps. With CURVE it encrypts what crosses. With a ticket, which is ZeroMQ's PLAIN, it only keeps strangers out,
// and what crosses has a seal of its own (seal.h). The rest of penstock uses ServerSocket, ClientSocket and the data
// sockets.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "net/keys.h"
#include "net/message_part.h"
#include "net/readiness.h"
#include "net/socket.h"
#include "net/stranger_guard.h"
#include "net/ticket.h"
#include "wire/message_limits.h"

namespace penstock::net {

// An error unless this libzmq has CURVE, and the repairs of 4.3.3: before, anyone who could reach the port could stop a
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
  kOffence,  // a message above a cap, or with a claim that no peer of ours makes; its parts were not kept
};

struct ReceivedMessage {
  std::string routing_id;  // of a router: the peer's, made up by this side's libzmq
  std::string user_id;     // of a router: ZAP's User-Id, as the authenticator gave it
  std::string address;     // of a router: the number of the peer's host
  std::vector<ReceivedPart> parts;
  std::string offence;  // the reason
};

// Confined to the thread that made it.
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

  // Without CURVE: the authenticator of the domain lets in whom it has given the ticket.
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

  // For those that open.
  TcpSocket(SocketContext& context, void* socket, bool is_router, const wire::MessageLimits& limits)
      : context_(context), socket_(socket), is_router_(is_router), limits_(limits) {}
  TcpSocket(const TcpSocket&) = delete;
  TcpSocket& operator=(const TcpSocket&) = delete;
  ~TcpSocket();

  // Listens at `endpoint`, and returns the address and port that are really bound. An address that other machines can
  // reach is refused unless the pool's keys were given. Connections are bounded from then on, those that have not shown
  // a key and those that have (stranger_guard.h), within what `use` leaves them. Can block while a name is looked up.
  Result<Endpoint> listen(const Endpoint& endpoint, KeyOrigin origin, const PortUse& use = {});
  // The address is ZeroMQ's.
  Result<void> connect(const std::string& address, bool is_ipv6);
  void disconnect(const std::string& address);
  // The key that the server of a client's next connections has.
  Result<void> expect_server(const PublicKey& key);

  // Has libzmq notice which connections began and ended. It looks by itself only now and then, so that a message which
  // is sent just after may otherwise go to a connection that is gone, and be lost.
  void settle();

  // Sends one message without blocking. `routing_id` is the peer's of a router, and empty for a client. kClosed when
  // the peer is gone or has no room; kTooLarge, sending nothing, above a cap. The parts' `release` is moved out of
  // them.
  Result<void> send(std::string_view routing_id, std::span<OutgoingPart> parts);

  // Fills `message` unless nothing is waiting. Its parts of before are dropped.
  Result<ReceiveOutcome> try_receive(ReceivedMessage& message);

  // The time that sent messages may still take to leave once this is destroyed: none unless this is called.
  void set_linger(std::chrono::milliseconds time);

  Waitable waitable() const { return Waitable(socket_); }

  // For the files of this room that speak to ZeroMQ.
  void* handle() const { return socket_; }

 private:
  Result<void> check_sizes(std::span<const OutgoingPart> parts) const;
  // Has the guard know whose the connection of a message is, which libzmq tells with the message alone.
  void note_holder(int fd, const ReceivedMessage& message);
  // The fault of a message of which this much has come; empty if there is none.
  std::string offence_of(size_t part_count, uint64_t message_bytes) const;

  SocketContext& context_;
  void* socket_;
  const bool is_router_;
  const wire::MessageLimits limits_;
  std::unique_ptr<StrangerGuard> guard_;  // of one that listens
  // By descriptor of libzmq's, the routing id of the connection that last sent a message with this number.
  std::unordered_map<int, std::string> noted_;
};

}  // namespace penstock::net
