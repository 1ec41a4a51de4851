// SPDX-License-Identifier: Apache-2.0
#include "net/authenticator.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace penstock::net {
namespace {

constexpr const char* kZapEndpoint = "inproc://zeromq.zap.01";  // where libzmq sends its requests
constexpr std::string_view kZapVersion = "1.0";
constexpr size_t kNoticeCountMax = 16;  // notices that were not taken yet

// The frames of a request, in order. The frames after the mechanism are its credentials: for CURVE the client's key;
// for PLAIN a name and a password.
enum ZapFrame : size_t { kVersion, kRequestId, kDomain, kAddress, kRoutingId, kMechanism, kCredential };

using Frames = std::vector<std::string>;

// Returns all frames of the next request, or none if there is no request.
Frames receive_frames(zmq::socket_t& socket) {
  Frames frames;
  bool is_more = true;
  zmq::message_t frame;
  while (is_more) {
    bool is_received = false;
    const auto done = try_zmq("receiving a key request",
                              [&] { is_received = socket.recv(frame, zmq::recv_flags::dontwait).has_value(); });
    is_more = done && is_received && frame.more();
    if (done && is_received) frames.push_back(frame.to_string());
  }
  return frames;
}

bool is_of(const Frames& request, std::string_view mechanism, size_t credential_count) {
  return request.size() == kCredential + credential_count && request[kVersion] == kZapVersion &&
         request[kMechanism] == mechanism;
}

std::optional<PublicKey> shown_key(const Frames& request) {
  if (!is_of(request, "CURVE", 1) || request[kCredential].size() != kKeyBytes) return std::nullopt;
  return PublicKey(std::as_bytes(std::span(request[kCredential])).first<kKeyBytes>());
}

std::optional<std::string_view> shown_ticket(const Frames& request) {
  if (!is_of(request, "PLAIN", 2) || request[kCredential] != kTicketHolder) return std::nullopt;
  return request[kCredential + 1];
}

}  // namespace

std::string PeerIdentity::user_id() const { return std::string(role_name(role)) + " " + key.text(); }

std::optional<PeerIdentity> PeerIdentity::parse(std::string_view user_id) {
  const size_t space = user_id.find(' ');
  if (space == std::string_view::npos) return std::nullopt;
  const auto role = find_role(user_id.substr(0, space));
  const auto key = PublicKey::parse(user_id.substr(space + 1));
  if (!role || !key) return std::nullopt;
  return PeerIdentity{.role = *role, .key = key.value()};
}

Authenticator::Authenticator(SocketContext& context)
    : context_(context), loop_("pk_keys", "which checks the keys of connecting clients", *this) {}

Result<std::unique_ptr<Authenticator>> Authenticator::start(SocketContext& context) {
  auto authenticator = std::make_unique<Authenticator>(context);
  if (auto started = authenticator->loop_.start(); !started) return started.error();
  return authenticator;
}

std::unique_ptr<Authenticator::Domain> Authenticator::make_domain(AllowedKeys allowed, KeyNames names, Look look) {
  MutexLock lock(mutex_);
  std::string name = "penstock-" + std::to_string(++domain_count_);
  const bool is_looking = look != nullptr;
  domains_.emplace(name, Allowed{.keys = std::move(allowed),
                                 .names = std::move(names),
                                 .ticket = {},
                                 .look = std::move(look),
                                 .notices = {},
                                 .trouble = {}});
  if (is_looking) loop_.wake();  // it may be sleeping forever
  return std::make_unique<Domain>(*this, std::move(name));
}

Authenticator::Domain::~Domain() {
  MutexLock lock(authenticator_.mutex_);
  authenticator_.domains_.erase(name_);
}

void Authenticator::Domain::expect(std::optional<Ticket> ticket) {
  MutexLock lock(authenticator_.mutex_);
  authenticator_.domains_.at(name_).ticket = std::move(ticket);
}

std::optional<std::string> Authenticator::Domain::holder_of(const PeerIdentity& identity) const {
  MutexLock lock(authenticator_.mutex_);
  const Allowed& allowed = authenticator_.domains_.at(name_);
  const auto found = allowed.keys.find(identity.key);
  if (found == allowed.keys.end() || found->second != identity.role) return std::nullopt;
  const auto holder = allowed.names.find(identity.key);
  return holder == allowed.names.end() ? std::string() : holder->second;
}

std::vector<std::string> Authenticator::Domain::take_notices() {
  MutexLock lock(authenticator_.mutex_);
  return std::exchange(authenticator_.domains_.at(name_).notices, {});
}

std::string Authenticator::Domain::trouble() const {
  MutexLock lock(authenticator_.mutex_);
  return authenticator_.domains_.at(name_).trouble;
}

uint64_t Authenticator::refused_count() const {
  MutexLock lock(mutex_);
  return refused_count_;
}

std::optional<std::string> Authenticator::admit(const std::vector<std::string>& request) {
  MutexLock lock(mutex_);
  const auto allowed = request.size() > kDomain ? domains_.find(request[kDomain]) : domains_.end();
  if (allowed != domains_.end()) {
    if (const auto key = shown_key(request)) {
      const auto found = allowed->second.keys.find(*key);
      if (found != allowed->second.keys.end()) return PeerIdentity{.role = found->second, .key = *key}.user_id();
    }
    auto& ticket = allowed->second.ticket;
    if (const auto shown = shown_ticket(request); shown && ticket && ticket->is(*shown)) {
      ticket.reset();  // each ticket is valid once
      return std::string(kTicketHolder);
    }
  }
  ++refused_count_;
  return std::nullopt;
}

Result<void> Authenticator::begin() {
  auto begun = try_zmq("starting the key check", [&] {
    socket_ = zmq::socket_t(context_.zmq(), zmq::socket_type::rep);
    socket_.set(zmq::sockopt::linger, 0);
    socket_.bind(kZapEndpoint);
  });
  if (!begun) socket_.close();  // on the thread that made it
  return begun;
}

void Authenticator::check_keys() {
  const Instant now = clock_now();
  if (now - checked_at_ < kKeyCheckInterval) return;
  checked_at_ = now;
  std::vector<std::pair<std::string, Look>> looks;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, allowed] : domains_)
      if (allowed.look) looks.emplace_back(name, allowed.look);
  }
  for (const auto& [name, look] : looks) apply_check(name, look());  // reads files, so without the lock
}

void Authenticator::apply_check(const std::string& domain, Result<std::optional<Change>> look) {
  MutexLock lock(mutex_);
  const auto found = domains_.find(domain);
  if (found == domains_.end()) return;
  Allowed& allowed = found->second;
  if (!look) {
    if (std::exchange(allowed.trouble, look.error().message) == look.error().message) return;
    allowed.notices.push_back("cannot reload its keys, and continues with the current ones: " + allowed.trouble);
  } else {
    allowed.trouble.clear();
    if (!look.value()) return;
    allowed.keys = std::move(look.value()->keys);
    allowed.names = std::move(look.value()->names);
    allowed.notices.push_back(std::move(look.value()->notice));
  }
  if (allowed.notices.size() > kNoticeCountMax) allowed.notices.erase(allowed.notices.begin());
}

long Authenticator::sleep_ms() const {
  MutexLock lock(mutex_);
  const bool is_looking =
      std::any_of(domains_.begin(), domains_.end(), [](const auto& item) { return item.second.look != nullptr; });
  if (!is_looking) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(checked_at_ + kKeyCheckInterval - clock_now());
  return std::max<long>(0, static_cast<long>(left.count()));
}

Result<bool> Authenticator::wait(int wake_fd, bool may_sleep) {
  bool is_awake = false;
  const Waitable requests(socket_);
  auto waited = wait_readable({&requests, 1}, {&wake_fd, 1}, {&is_awake, 1},
                              std::chrono::milliseconds(may_sleep ? sleep_ms() : 0));
  if (!waited) return Fault{waited.error().code, "waiting for key requests failed: " + waited.error().message};
  return is_awake;
}

// Answers one request: libzmq sends the next one only once it has the answer.
Result<void> Authenticator::serve() {
  check_keys();
  const Frames request = receive_frames(socket_);
  if (request.empty()) return {};
  const auto user_id = admit(request);
  const Frames reply = {std::string(kZapVersion), request.size() > kRequestId ? request[kRequestId] : std::string(),
                        user_id ? "200" : "400",  user_id ? "OK" : "this key or token is not accepted here",
                        user_id.value_or(""),     std::string()};
  for (size_t index = 0; index < reply.size(); ++index) {
    const auto more = index + 1 < reply.size() ? zmq::send_flags::sndmore : zmq::send_flags::none;
    // If libzmq shuts down, wait() reports it.
    static_cast<void>(try_zmq("answering a key request",
                              [&] { socket_.send(zmq::buffer(reply[index]), zmq::send_flags::dontwait | more); }));
  }
  return {};
}

}  // namespace penstock::net
