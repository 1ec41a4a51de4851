// SPDX-License-Identifier: Apache-2.0
#include "net/tcp_socket.h"

#include <zmq.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "base/result.h"
#include "net/socket.h"

namespace penstock::net {
namespace {

zmq_msg_t* message(void* storage) { return static_cast<zmq_msg_t*>(storage); }

}  // namespace

ReceivedPart::ReceivedPart() {
  static_assert(sizeof(zmq_msg_t) == sizeof storage_ && alignof(zmq_msg_t) <= alignof(void*));
  zmq_msg_init(message(handle()));
}

ReceivedPart::ReceivedPart(ReceivedPart&& other) noexcept : ReceivedPart() { *this = std::move(other); }

ReceivedPart& ReceivedPart::operator=(ReceivedPart&& other) noexcept {
  // Closes this part's message and takes the other's, which is empty afterwards.
  if (this != &other) zmq_msg_move(message(handle()), message(other.handle()));
  return *this;
}

ReceivedPart::~ReceivedPart() { zmq_msg_close(message(handle())); }

std::span<const std::byte> ReceivedPart::bytes() const {
  auto* part = const_cast<zmq_msg_t*>(reinterpret_cast<const zmq_msg_t*>(storage_.data()));
  return {static_cast<const std::byte*>(zmq_msg_data(part)), zmq_msg_size(part)};
}

namespace {

// zmq.h lists it only among the drafts, but every libzmq since 4.3.0 has it. With it a server refuses every client if
// there is no authenticator; without it every client would be admitted.
constexpr int kZapEnforceDomain = 93;

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

// Sets options one after the other, and records whether all could be set.
class Options {
 public:
  explicit Options(void* socket) : socket_(socket) {}

  Options& set(int option, const void* value, size_t size) {
    is_set_ = is_set_ && zmq_setsockopt(socket_, option, value, size) == 0;
    return *this;
  }
  Options& set(int option, int value) { return set(option, &value, sizeof value); }
  Options& set(int option, std::span<const std::byte> bytes) { return set(option, bytes.data(), bytes.size()); }

  bool is_set() const { return is_set_; }

 private:
  void* socket_;
  bool is_set_ = true;
};

Result<std::unique_ptr<TcpSocket>> open(SocketContext& context, int type, const wire::MessageLimits& limits) {
  PENSTOCK_ASSERT(limits.part_bytes_max >= wire::kPartBytesMaxLeast && limits.part_bytes_max <= wire::kPartBytesMax);
  if (auto checked = check_zmq(ZmqFacts::of_this_process()); !checked) return checked.error();
  void* raw = zmq_socket(context.handle(), type);
  if (raw == nullptr) return zmq_failure("opening a ZeroMQ socket");
  auto socket = std::make_unique<TcpSocket>(context, raw, type == ZMQ_ROUTER, limits);
  const int64_t frame_bytes_max = static_cast<int64_t>(limits.part_bytes_max) + kCurveBytes;
  Options options(raw);
  options.set(ZMQ_LINGER, 0)
      .set(ZMQ_SNDHWM, limits.sent_messages_max)
      .set(ZMQ_RCVHWM, limits.received_messages_max)
      .set(ZMQ_MAXMSGSIZE, &frame_bytes_max, sizeof frame_bytes_max)
      .set(ZMQ_TCP_KEEPALIVE, 1)
      .set(ZMQ_TCP_KEEPALIVE_IDLE, kKeepaliveIdleS)
      .set(ZMQ_TCP_KEEPALIVE_INTVL, kKeepaliveIntervalS)
      .set(ZMQ_TCP_KEEPALIVE_CNT, kKeepaliveCount)
      .set(ZMQ_TCP_MAXRT, kUnansweredMsMax);
  if (!options.is_set()) return zmq_failure("setting up a ZeroMQ socket");
  return socket;
}

void set_up_server(Options& options, const std::string& zap_domain, std::chrono::milliseconds handshake_interval) {
  PENSTOCK_ASSERT(!zap_domain.empty(), "a domain is required for keys to be checked");
  // HANDOVER stays off: with it, a peer that claims the routing id of another would receive the other's messages. It is
  // not needed, since our clients claim no id and get a new one with every connection.
  options.set(ZMQ_ZAP_DOMAIN, zap_domain.data(), zap_domain.size())
      .set(kZapEnforceDomain, 1)
      .set(ZMQ_ROUTER_MANDATORY, 1)
      .set(ZMQ_ROUTER_HANDOVER, 0)
      .set(ZMQ_BACKLOG, kBacklog)
      .set(ZMQ_HANDSHAKE_IVL, static_cast<int>(handshake_interval.count()));
}

void set_up_client(Options& options, std::chrono::milliseconds handshake_interval) {
  // IMMEDIATE: no messages are queued for a server that is not connected; sending then fails.
  options.set(ZMQ_IMMEDIATE, 1)
      .set(ZMQ_RECONNECT_IVL, kReconnectMsMin)
      .set(ZMQ_RECONNECT_IVL_MAX, kReconnectMsMax)
      .set(ZMQ_CONNECT_TIMEOUT, kConnectTimeoutMs)
      .set(ZMQ_HANDSHAKE_IVL, static_cast<int>(handshake_interval.count()));
}

// Applies `set` to the options of `socket`.
Result<std::unique_ptr<TcpSocket>> set_up(Result<std::unique_ptr<TcpSocket>> socket, const std::string& what,
                                          const std::function<void(Options&)>& set) {
  if (!socket) return socket;
  Options options(socket.value()->handle());
  set(options);
  if (!options.is_set()) return zmq_failure("setting up a ZeroMQ " + what);
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
void take_up_events(void* socket) {
  int events = 0;
  size_t length = sizeof events;
  zmq_getsockopt(socket, ZMQ_EVENTS, &events, &length);
}

const HandshakeBytes& handshake_of(void* socket) {
  int mechanism = ZMQ_NULL;
  size_t length = sizeof mechanism;
  zmq_getsockopt(socket, ZMQ_MECHANISM, &mechanism, &length);
  return mechanism == ZMQ_PLAIN ? kTicketHandshake : kCurveHandshake;
}

// The parts of one message while they are passed to libzmq. Parts that were not sent are closed, which releases them.
class QueuedParts {
 public:
  QueuedParts() = default;
  QueuedParts(const QueuedParts&) = delete;
  QueuedParts& operator=(const QueuedParts&) = delete;
  ~QueuedParts() {
    for (size_t index = 0; index < count_; ++index) zmq_msg_close(&frames_[index]);
  }

  [[nodiscard]] bool try_add_copy(std::span<const std::byte> bytes) {
    zmq_msg_t& frame = frames_[count_];
    if (zmq_msg_init_size(&frame, bytes.size()) != 0) return false;
    ++count_;
    if (!bytes.empty()) std::memcpy(zmq_msg_data(&frame), bytes.data(), bytes.size());
    return true;
  }

  // Takes `release`, and calls it even if it returns false.
  [[nodiscard]] bool try_add(std::span<const std::byte> bytes, std::function<void()> release) {
    auto holder = std::make_unique<Release>();
    holder->call = std::move(release);
    // release: pairs with the acquire in call_release(). libzmq also orders the two, but no sanitizer can see it.
    holder->is_set.store(true, std::memory_order_release);
    void* data = const_cast<std::byte*>(bytes.data());  // libzmq only reads the bytes that it sends
    if (zmq_msg_init_data(&frames_[count_], data, bytes.size(), &call_release, holder.get()) != 0) {
      holder->call();
      return false;
    }
    static_cast<void>(holder.release());  // call_release owns it from now on
    ++count_;
    return true;
  }

  Result<void> send(void* socket) {
    bool is_sent = true;
    for (size_t index = 0; index < count_; ++index) {
      int sent = send_part(socket, index);
      if (sent < 0 && zmq_errno() == EAGAIN && index == 0) {
        // While messages flow, libzmq checks only occasionally whether the peer has taken some of them, and until then
        // reports that there is no room.
        take_up_events(socket);
        sent = send_part(socket, index);
      }
      if (sent >= 0) continue;
      if (zmq_errno() != EAGAIN && zmq_errno() != EHOSTUNREACH) return zmq_failure("sending to a peer");
      is_sent = false;
      // If the peer vanishes between two parts, libzmq drops every part that is offered, up to the last one. All parts
      // must then be offered, or the next message would lose its first ones.
      if (index == 0) break;
    }
    if (is_sent) return {};
    return Fault{Errc::kClosed, "sending to a peer failed: it has disconnected, or does not read its messages"};
  }

 private:
  struct Release {
    std::function<void()> call;
    std::atomic<bool> is_set = false;
  };

  int send_part(void* socket, size_t index) {
    const int more = index + 1 < count_ ? ZMQ_SNDMORE : 0;
    int sent = 0;
    do {
      sent = zmq_msg_send(&frames_[index], socket, ZMQ_DONTWAIT | more);
    } while (sent < 0 && zmq_errno() == EINTR);
    return sent;
  }

  static void call_release(void* /*data*/, void* holder) {
    const std::unique_ptr<Release> release(static_cast<Release*>(holder));
    // acquire: pairs with the release in try_add().
    if (release->is_set.load(std::memory_order_acquire)) release->call();
  }

  std::array<zmq_msg_t, wire::kPartCountMax + 1> frames_;
  size_t count_ = 0;
};

// One part of a message that is being received.
Result<bool> try_receive_part(void* socket, ReceivedPart& part, bool is_first) {
  auto* frame = static_cast<zmq_msg_t*>(part.handle());
  int received = 0;
  do {
    received = zmq_msg_recv(frame, socket, ZMQ_DONTWAIT);
  } while (received < 0 && zmq_errno() == EINTR);
  if (received >= 0) return true;
  if (is_first && zmq_errno() == EAGAIN) return false;
  return zmq_failure("receiving from a peer");
}

bool has_more(ReceivedPart& part) { return zmq_msg_more(static_cast<zmq_msg_t*>(part.handle())) != 0; }

std::string text_of(const ReceivedPart& part) {
  return {reinterpret_cast<const char*>(part.bytes().data()), part.bytes().size()};
}

// The descriptor that a message's connection has, or had; -1 if libzmq does not know it.
int descriptor_of(ReceivedPart& part) { return zmq_msg_get(static_cast<zmq_msg_t*>(part.handle()), ZMQ_SRCFD); }

// A property of a message's connection, set by libzmq or by the authenticator.
std::string property_of(ReceivedPart& part, const char* name) {
  const char* value = zmq_msg_gets(static_cast<zmq_msg_t*>(part.handle()), name);
  return value == nullptr ? "" : value;
}

}  // namespace

ZmqFacts ZmqFacts::of_this_process() {
  ZmqFacts facts;
  ::zmq_version(&facts.major, &facts.minor, &facts.patch);
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
  return set_up(open(context, ZMQ_ROUTER, limits), "server", [&](Options& options) {
    options.set(ZMQ_CURVE_SERVER, 1).set(ZMQ_CURVE_SECRETKEY, setup.own.secret_key().bytes());
    set_up_server(options, setup.zap_domain, setup.handshake_interval);
  });
}

Result<std::unique_ptr<TcpSocket>> TcpSocket::open_client(SocketContext& context, const ClientSetup& setup,
                                                          const wire::MessageLimits& limits) {
  return set_up(open(context, ZMQ_DEALER, limits), "client", [&](Options& options) {
    options.set(ZMQ_CURVE_SERVERKEY, setup.server_key.bytes())
        .set(ZMQ_CURVE_PUBLICKEY, setup.own.public_key().bytes())
        .set(ZMQ_CURVE_SECRETKEY, setup.own.secret_key().bytes());
    set_up_client(options, setup.handshake_interval);
  });
}

Result<std::unique_ptr<TcpSocket>> TcpSocket::open_ticket_server(SocketContext& context, const TicketServerSetup& setup,
                                                                 const wire::MessageLimits& limits) {
  return set_up(open(context, ZMQ_ROUTER, limits), "server", [&](Options& options) {
    options.set(ZMQ_PLAIN_SERVER, 1);
    set_up_server(options, setup.zap_domain, setup.handshake_interval);
  });
}

Result<std::unique_ptr<TcpSocket>> TcpSocket::open_ticket_client(SocketContext& context, const TicketClientSetup& setup,
                                                                 const wire::MessageLimits& limits) {
  return set_up(open(context, ZMQ_DEALER, limits), "client", [&](Options& options) {
    const std::string& ticket = setup.ticket.text();
    options.set(ZMQ_PLAIN_USERNAME, kTicketHolder.data(), kTicketHolder.size())
        .set(ZMQ_PLAIN_PASSWORD, ticket.data(), ticket.size());
    set_up_client(options, setup.handshake_interval);
  });
}

TcpSocket::~TcpSocket() {
  guard_.reset();
  zmq_close(socket_);
}

Result<Endpoint> TcpSocket::listen(const Endpoint& endpoint, KeyOrigin origin, const PortUse& use) {
  auto found = resolve_bind_address(endpoint);
  if (!found) return found.error();
  if (auto checked = check_reach(endpoint, found.value(), origin); !checked) return checked.error();
  auto guard = StrangerGuard::start(context_, socket_, handshake_of(socket_), use);
  if (!guard) return guard.error();
  guard_ = std::move(guard).value();
  const std::string address = zmq_address(found.value(), endpoint.port);
  const int is_ipv6 = found.value().is_ipv6 ? 1 : 0;
  if (!Options(socket_).set(ZMQ_IPV6, is_ipv6).is_set() || zmq_bind(socket_, address.c_str()) != 0) {
    return Fault{Errc::kFailed, "listening at " + address + " failed: " + zmq_strerror(zmq_errno()) +
                                    "; choose an address of this machine and a free port, or port 0"};
  }
  std::array<char, 256> bound{};
  size_t length = bound.size();
  if (zmq_getsockopt(socket_, ZMQ_LAST_ENDPOINT, bound.data(), &length) != 0)
    return zmq_failure("getting the address of a server");
  auto real = Endpoint::parse(bound.data());
  PENSTOCK_ASSERT(real, "libzmq names its own endpoint ", bound.data());
  return real;
}

Result<void> TcpSocket::connect(const std::string& address, bool is_ipv6) {
  if (!Options(socket_).set(ZMQ_IPV6, is_ipv6 ? 1 : 0).is_set() || zmq_connect(socket_, address.c_str()) != 0) {
    return zmq_failure("connecting to " + address);
  }
  return {};
}

// An address that libzmq has given up on is no longer connected, which is the desired state.
void TcpSocket::disconnect(const std::string& address) { zmq_disconnect(socket_, address.c_str()); }

Result<void> TcpSocket::expect_server(const PublicKey& key) {
  if (!Options(socket_).set(ZMQ_CURVE_SERVERKEY, key.bytes()).is_set())
    return zmq_failure("setting up a ZeroMQ client");
  return {};
}

void TcpSocket::settle() { take_up_events(socket_); }

void TcpSocket::set_linger(std::chrono::milliseconds time) {
  const int linger_ms = static_cast<int>(time.count());
  zmq_setsockopt(socket_, ZMQ_LINGER, &linger_ms, sizeof linger_ms);
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
  QueuedParts message;
  bool is_added = !is_router_ || message.try_add_copy(std::as_bytes(std::span(routing_id)));
  for (OutgoingPart& part : parts) {
    if (!part.release) {
      is_added = is_added && message.try_add_copy(part.bytes);
    } else if (is_added) {
      is_added = message.try_add(part.bytes, std::exchange(part.release, nullptr));
    } else {
      std::exchange(part.release, nullptr)();
    }
  }
  if (!is_added) return Fault{Errc::kNoMemory, "sending to a peer failed: insufficient memory for the message"};
  return message.send(socket_);
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
    is_more = has_more(part);
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
