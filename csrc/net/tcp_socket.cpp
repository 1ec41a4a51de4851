// SPDX-License-Identifier: Apache-2.0
#include "net/tcp_socket.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <functional>
#include <tuple>
#include <utility>

#include "base/result.h"
#include "net/socket.h"

namespace penstock::net {
namespace {

// zmq.h lists it only among the drafts, but every libzmq since 4.3.0 has it. With it a server refuses every client if
// there is no authenticator; without it every client would be admitted.
constexpr zmq::sockopt::integral_option<93, int, true> kZapEnforceDomain{};

constexpr int64_t kCurveBytes = 33;  // CURVE adds these to a part: a name, a nonce, a code and the flags
// The maximum number of connections of a port that wait to be accepted, and also of silent ones (stranger_guard.h). The
// system has a separate limit (net.core.somaxconn), which has the same default since Linux 5.4.
constexpr int kBacklog = 4096;
constexpr int kReconnectMsMin = 50;  // doubled on each attempt
constexpr int kReconnectMsMax = 1000;
constexpr int kConnectTimeoutMs = 2000;  // the system's is minutes, during which a host that came back is not tried
// A host that vanished is detected after 10 + 3 * 5 seconds, or 15 seconds of unacknowledged data; its queue is then
// dropped. The protocol above detects it much sooner by its pings. ZeroMQ's heartbeats would not help it, and would
// drop a connection in the middle of a long part (libzmq issue 2709).
constexpr int kKeepaliveIdleS = 10;
constexpr int kKeepaliveIntervalS = 5;
constexpr int kKeepaliveCount = 3;
constexpr int kUnansweredMsMax = 15'000;

// Routing ids that libzmq assigns start with this byte, which it reserves.
constexpr char kMadeUp = '\0';

Result<std::unique_ptr<TcpSocket>> open(SocketContext& context, zmq::socket_type type,
                                        const wire::MessageLimits& limits) {
  PENSTOCK_ASSERT(limits.part_bytes_max >= wire::kPartBytesLimitMin && limits.part_bytes_max <= wire::kPartBytesMax);
  if (auto checked = check_zmq(ZmqFacts::of_this_process()); !checked) return checked.error();
  zmq::socket_t socket;
  const auto opened = try_zmq("opening a ZeroMQ socket", [&] {
    socket = zmq::socket_t(context.zmq(), type);
    socket.set(zmq::sockopt::linger, 0);
    socket.set(zmq::sockopt::sndhwm, limits.sent_messages_max);
    socket.set(zmq::sockopt::rcvhwm, limits.received_messages_max);
    socket.set(zmq::sockopt::maxmsgsize, static_cast<int64_t>(limits.part_bytes_max) + kCurveBytes);
    socket.set(zmq::sockopt::tcp_keepalive, 1);
    socket.set(zmq::sockopt::tcp_keepalive_idle, kKeepaliveIdleS);
    socket.set(zmq::sockopt::tcp_keepalive_intvl, kKeepaliveIntervalS);
    socket.set(zmq::sockopt::tcp_keepalive_cnt, kKeepaliveCount);
    socket.set(zmq::sockopt::tcp_maxrt, kUnansweredMsMax);
  });
  if (!opened) return opened.error();
  return std::make_unique<TcpSocket>(context, std::move(socket), type == zmq::socket_type::router, limits);
}

void set_up_server(zmq::socket_t& socket, const std::string& zap_domain, std::chrono::milliseconds handshake_interval) {
  PENSTOCK_ASSERT(!zap_domain.empty(), "a domain is required for keys to be checked");
  // HANDOVER stays off: with it, a peer that claims the routing id of another would receive the other's messages. It is
  // not needed, since our clients claim no id and get a new one with every connection.
  socket.set(zmq::sockopt::zap_domain, zap_domain);
  socket.set(kZapEnforceDomain, true);
  socket.set(zmq::sockopt::router_mandatory, true);
  socket.set(zmq::sockopt::router_handover, false);
  socket.set(zmq::sockopt::backlog, kBacklog);
  socket.set(zmq::sockopt::handshake_ivl, static_cast<int>(handshake_interval.count()));
}

void set_up_client(zmq::socket_t& socket, std::chrono::milliseconds handshake_interval) {
  // IMMEDIATE: no messages are queued for a server that is not connected; sending then fails.
  socket.set(zmq::sockopt::immediate, true);
  socket.set(zmq::sockopt::reconnect_ivl, kReconnectMsMin);
  socket.set(zmq::sockopt::reconnect_ivl_max, kReconnectMsMax);
  socket.set(zmq::sockopt::connect_timeout, kConnectTimeoutMs);
  socket.set(zmq::sockopt::handshake_ivl, static_cast<int>(handshake_interval.count()));
}

zmq::const_buffer buffer_of(std::span<const std::byte> bytes) { return zmq::buffer(bytes.data(), bytes.size()); }

// Applies `set` to the options of `socket`.
Result<std::unique_ptr<TcpSocket>> set_up(Result<std::unique_ptr<TcpSocket>> socket, const std::string& what,
                                          const std::function<void(zmq::socket_t&)>& set) {
  if (!socket) return socket;
  if (auto done = try_zmq("setting up a ZeroMQ " + what, [&] { set(socket.value()->zmq()); }); !done)
    return done.error();
  return socket;
}

Result<void> check_reach(const Endpoint& endpoint, const HostAddress& address, KeyOrigin origin) {
  if (address.is_loopback || origin == KeyOrigin::kGiven) return {};
  return Fault{Errc::kUnsupported, "listening at " + endpoint.text() + " is not permitted: other machines can reach " +
                                       address.number +
                                       " and no keys restrict the access; create keys with penstock keys DIR and pass "
                                       "their folder with --keys or PENSTOCK_KEYS, or listen at tcp://127.0.0.1"};
}

// Makes libzmq process the commands that its I/O thread has sent to the socket.
void take_up_events(zmq::socket_t& socket) {
  static_cast<void>(
      try_zmq("getting the events of a socket", [&] { static_cast<void>(socket.get(zmq::sockopt::events)); }));
}

// Passes the parts of one message to libzmq. Parts that were not sent are released when `parts` is destroyed.
Result<void> send_parts(zmq::socket_t& socket, std::span<zmq::message_t> parts) {
  bool is_sent = true;
  for (size_t index = 0; index < parts.size(); ++index) {
    const auto flags =
        zmq::send_flags::dontwait | (index + 1 < parts.size() ? zmq::send_flags::sndmore : zmq::send_flags::none);
    bool is_part_sent = false;
    const auto send = [&]() -> Result<void> {
      return try_zmq("sending to a peer", [&] {
        try {
          is_part_sent = socket.send(parts[index], flags).has_value();
        } catch (const zmq::error_t& error) {
          if (error.num() != EHOSTUNREACH) throw;  // the peer has disconnected
        }
      });
    };
    auto done = send();
    if (done && !is_part_sent && index == 0) {
      // While messages flow, libzmq checks only occasionally whether the peer has taken some of them, and until then
      // reports that there is no room.
      take_up_events(socket);
      done = send();
    }
    if (!done) return done;
    if (is_part_sent) continue;
    is_sent = false;
    // If the peer vanishes between two parts, libzmq drops every part that is offered, up to the last one. All parts
    // must then be offered, or the next message would lose its first ones.
    if (index == 0) break;
  }
  if (is_sent) return {};
  return Fault{Errc::kClosed, "sending to a peer failed: it has disconnected, or does not read its messages"};
}

// The owner of a part's bytes until libzmq has read them.
struct Release {
  std::function<void()> call;
  std::atomic<bool> is_set = false;
};

void call_release(void* /*data*/, void* holder) {
  const std::unique_ptr<Release> release(static_cast<Release*>(holder));
  // acquire: pairs with the release in make_part().
  if (release->is_set.load(std::memory_order_acquire)) release->call();
}

// A message that refers to the bytes of `part`, or copies them if it has no `release`. Moves from `release`, and calls
// it if this throws zmq::error_t.
zmq::message_t make_part(OutgoingPart& part) {
  if (!part.release) return zmq::message_t(part.bytes.data(), part.bytes.size());
  auto holder = std::make_unique<Release>();
  holder->call = std::exchange(part.release, nullptr);
  // release: pairs with the acquire in call_release(). libzmq also orders the two, but no sanitizer can see it.
  holder->is_set.store(true, std::memory_order_release);
  void* data = const_cast<std::byte*>(part.bytes.data());  // libzmq only reads the bytes that it sends
  try {
    zmq::message_t message(data, part.bytes.size(), &call_release, holder.get());
    static_cast<void>(holder.release());  // call_release owns it from now on
    return message;
  } catch (const zmq::error_t&) {
    holder->call();
    throw;
  }
}

// One part of a message that is being received; false if none was waiting.
Result<bool> try_receive_part(zmq::socket_t& socket, ReceivedPart& part, bool is_first) {
  bool is_received = false;
  const auto done = try_zmq("receiving from a peer", [&] {
    is_received = socket.recv(part.message, zmq::recv_flags::dontwait).has_value();
    if (!is_received && !is_first) throw zmq::error_t(EAGAIN);  // libzmq queues whole messages
  });
  if (!done) return done.error();
  return is_received;
}

std::string text_of(const ReceivedPart& part) { return part.message.to_string(); }

// The descriptor that a message's connection has, or had; -1 if libzmq does not know it. cppzmq's get() throws for it.
int descriptor_of(ReceivedPart& part) { return zmq_msg_get(part.message.handle(), ZMQ_SRCFD); }

// A property of a message's connection, set by libzmq or by the authenticator. cppzmq's gets() throws if it is not set.
std::string property_of(ReceivedPart& part, const char* name) {
  const char* value = zmq_msg_gets(part.message.handle(), name);
  return value == nullptr ? "" : value;
}

}  // namespace

ZmqFacts ZmqFacts::of_this_process() {
  ZmqFacts facts;
  std::tie(facts.major, facts.minor, facts.patch) = zmq::version();
  facts.has_curve = zmq_has("curve") != 0;
  return facts;
}

Result<void> check_zmq(const ZmqFacts& facts) {
  const std::string version =
      std::to_string(facts.major) + "." + std::to_string(facts.minor) + "." + std::to_string(facts.patch);
  if (std::tie(facts.major, facts.minor, facts.patch) < std::make_tuple(4, 3, 3)) {
    return Fault{Errc::kUnsupported, "pools cannot be used: libzmq has version " + version +
                                         ", but before 4.3.3 anyone who can reach the port can stop or corrupt a "
                                         "server; install libzmq 4.3.3 or later"};
  }
  if (!facts.has_curve) {
    return Fault{Errc::kUnsupported,
                 "pools require CURVE, but libzmq " + version +
                     " was built without it; install a libzmq with libsodium, such as Debian's libzmq5"};
  }
  return {};
}

Result<std::unique_ptr<TcpSocket>> TcpSocket::open_server(SocketContext& context, const ServerSetup& setup,
                                                          const wire::MessageLimits& limits) {
  return set_up(open(context, zmq::socket_type::router, limits), "server", [&](zmq::socket_t& socket) {
    socket.set(zmq::sockopt::curve_server, true);
    socket.set(zmq::sockopt::curve_secretkey, buffer_of(setup.own.secret_key().bytes()));
    set_up_server(socket, setup.zap_domain, setup.handshake_interval);
  });
}

Result<std::unique_ptr<TcpSocket>> TcpSocket::open_client(SocketContext& context, const ClientSetup& setup,
                                                          const wire::MessageLimits& limits) {
  return set_up(open(context, zmq::socket_type::dealer, limits), "client", [&](zmq::socket_t& socket) {
    socket.set(zmq::sockopt::curve_serverkey, buffer_of(setup.server_key.bytes()));
    socket.set(zmq::sockopt::curve_publickey, buffer_of(setup.own.public_key().bytes()));
    socket.set(zmq::sockopt::curve_secretkey, buffer_of(setup.own.secret_key().bytes()));
    set_up_client(socket, setup.handshake_interval);
  });
}

Result<std::unique_ptr<TcpSocket>> TcpSocket::open_ticket_server(SocketContext& context, const TicketServerSetup& setup,
                                                                 const wire::MessageLimits& limits) {
  return set_up(open(context, zmq::socket_type::router, limits), "server", [&](zmq::socket_t& socket) {
    socket.set(zmq::sockopt::plain_server, true);
    set_up_server(socket, setup.zap_domain, setup.handshake_interval);
  });
}

Result<std::unique_ptr<TcpSocket>> TcpSocket::open_ticket_client(SocketContext& context, const TicketClientSetup& setup,
                                                                 const wire::MessageLimits& limits) {
  return set_up(open(context, zmq::socket_type::dealer, limits), "client", [&](zmq::socket_t& socket) {
    socket.set(zmq::sockopt::plain_username, kTicketHolder);
    socket.set(zmq::sockopt::plain_password, setup.ticket.text());
    set_up_client(socket, setup.handshake_interval);
  });
}

Result<Endpoint> TcpSocket::listen(const Endpoint& endpoint, KeyOrigin origin, const PortUse& use) {
  auto found = resolve_bind_address(endpoint);
  if (!found) return found.error();
  if (auto checked = check_reach(endpoint, found.value(), origin); !checked) return checked.error();
  bool is_plain = false;
  const auto got = try_zmq("getting the mechanism of a server",
                           [&] { is_plain = socket_.get(zmq::sockopt::mechanism) == ZMQ_PLAIN; });
  if (!got) return got.error();
  auto guard = StrangerGuard::start(context_, socket_, is_plain ? kTicketHandshake : kCurveHandshake, use);
  if (!guard) return guard.error();
  guard_ = std::move(guard).value();
  const std::string address = zmq_address(found.value(), endpoint.port);
  auto bound = try_zmq("listening at " + address, [&] {
    socket_.set(zmq::sockopt::ipv6, found.value().is_ipv6);
    socket_.bind(address);
  });
  if (!bound) {
    return Fault{bound.error().code,
                 bound.error().message + "; choose an address of this machine and a free port, or port 0"};
  }
  std::string name;
  const auto named =
      try_zmq("getting the address of a server", [&] { name = socket_.get(zmq::sockopt::last_endpoint); });
  if (!named) return named.error();
  auto real = Endpoint::parse(name);
  PENSTOCK_ASSERT(real, "libzmq names its own endpoint ", name);
  return real;
}

Result<void> TcpSocket::connect(const std::string& address, bool is_ipv6) {
  return try_zmq("connecting to " + address, [&] {
    socket_.set(zmq::sockopt::ipv6, is_ipv6);
    socket_.connect(address);
  });
}

// An address that libzmq has given up on is no longer connected, which is the desired state.
void TcpSocket::disconnect(const std::string& address) {
  static_cast<void>(try_zmq("disconnecting", [&] { socket_.disconnect(address); }));
}

Result<void> TcpSocket::expect_server(const PublicKey& key) {
  return try_zmq("setting up a ZeroMQ client",
                 [&] { socket_.set(zmq::sockopt::curve_serverkey, buffer_of(key.bytes())); });
}

void TcpSocket::settle() { take_up_events(socket_); }

void TcpSocket::set_linger(std::chrono::milliseconds time) {
  static_cast<void>(
      try_zmq("setting the linger time", [&] { socket_.set(zmq::sockopt::linger, static_cast<int>(time.count())); }));
}

Result<void> TcpSocket::check_sizes(std::span<const OutgoingPart> parts) const {
  PENSTOCK_ASSERT(!parts.empty(), "a message must have at least one part");
  uint64_t message_bytes = 0;
  for (const OutgoingPart& part : parts) {
    message_bytes += part.bytes.size();
    if (part.bytes.size() <= limits_.part_bytes_max) continue;
    return Fault{Errc::kTooLarge, "sending to a peer failed: a part is " + std::to_string(part.bytes.size()) +
                                      " bytes, but the limit is " + std::to_string(limits_.part_bytes_max) +
                                      "; send it in several messages"};
  }
  if (parts.size() <= wire::kPartCountMax && message_bytes <= limits_.message_bytes_max) return {};
  return Fault{Errc::kTooLarge, "sending to a peer failed: the message is " + std::to_string(parts.size()) +
                                    " parts with " + std::to_string(message_bytes) + " bytes and may be " +
                                    std::to_string(wire::kPartCountMax) + " with " +
                                    std::to_string(limits_.message_bytes_max) + "; send several messages"};
}

Result<void> TcpSocket::send(std::string_view routing_id, std::span<OutgoingPart> parts) {
  PENSTOCK_ASSERT(is_router_ == !routing_id.empty(), "a server must specify the peer, and a client must not");
  if (auto checked = check_sizes(parts); !checked) {
    for (OutgoingPart& part : parts) {
      if (part.release) std::exchange(part.release, nullptr)();
    }
    return checked;
  }
  std::array<zmq::message_t, wire::kPartCountMax + 1> messages;
  size_t count = 0;
  const auto made = try_zmq("sending to a peer", [&] {
    if (is_router_) messages[count++] = zmq::message_t(routing_id);
    for (OutgoingPart& part : parts) messages[count++] = make_part(part);
  });
  if (!made) {
    for (OutgoingPart& part : parts)
      if (part.release) std::exchange(part.release, nullptr)();
    return Fault{Errc::kNoMemory, "sending to a peer failed: insufficient memory for the message"};
  }
  return send_parts(socket_, std::span(messages).first(count));
}

Result<ReceiveOutcome> TcpSocket::try_receive(ReceivedMessage& message) {
  message.parts.clear();
  message.offence.clear();
  ReceivedPart part;
  if (is_router_) {
    auto received = try_receive_part(socket_, part, /*is_first=*/true);
    if (!received) return received.error();
    if (!received.value()) {
      if (auto health = guard_ ? guard_->health() : Result<void>(); !health) return health.error();
      return ReceiveOutcome::kNothing;
    }
    message.routing_id = text_of(part);
    if (!message.routing_id.starts_with(kMadeUp)) message.offence = "it claimed a routing id";
  }
  uint64_t message_bytes = 0;
  size_t part_count = 0;
  bool is_more = true;
  while (is_more) {
    auto received = try_receive_part(socket_, part, /*is_first=*/!is_router_ && part_count == 0);
    if (!received) return received.error();
    if (!received.value()) return ReceiveOutcome::kNothing;
    is_more = part.message.more();
    if (part_count == 0 && is_router_) {
      message.user_id = property_of(part, "User-Id");
      message.address = property_of(part, "Peer-Address");
      note_holder(descriptor_of(part), message);
    }
    ++part_count;
    message_bytes += part.bytes().size();
    if (message.offence.empty()) message.offence = offence_of(part_count, message_bytes);
    // The rest of an invalid message is read and dropped to remove it from the queue.
    if (message.offence.empty()) {
      message.parts.push_back(std::move(part));
    } else {
      message.parts.clear();
    }
  }
  return message.offence.empty() ? ReceiveOutcome::kMessage : ReceiveOutcome::kOffence;
}

void TcpSocket::note_holder(int fd, const ReceivedMessage& message) {
  if (!guard_ || fd < 0) return;
  std::string& noted = noted_[fd];
  if (noted == message.routing_id) return;
  noted = message.routing_id;
  guard_->note_holder(fd, message.user_id);
}

std::string TcpSocket::offence_of(size_t part_count, uint64_t message_bytes) const {
  if (part_count > wire::kPartCountMax)
    return "it sent a message of more than " + std::to_string(wire::kPartCountMax) + " parts";
  if (message_bytes > limits_.message_bytes_max) {
    return "it sent a message of more than " + std::to_string(limits_.message_bytes_max) + " bytes";
  }
  return {};
}

}  // namespace penstock::net
