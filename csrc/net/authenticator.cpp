// SPDX-License-Identifier: Apache-2.0
#include "net/authenticator.h"

#include <zmq.h>

#include <cerrno>
#include <span>
#include <utility>
#include <vector>

namespace penstock::net {
namespace {

constexpr const char* kZapEndpoint = "inproc://zeromq.zap.01";  // where libzmq asks
constexpr std::string_view kZapVersion = "1.0";

// The frames of a request, in order. Those after the mechanism are its credentials: for CURVE one, the client's key.
enum ZapFrame : size_t { kVersion, kRequestId, kDomain, kAddress, kRoutingId, kMechanism, kKey, kZapFrameCount };

using Frames = std::vector<std::string>;

// All frames of the next request, none if there is none.
Frames receive_frames(void* socket) {
  Frames frames;
  bool is_more = true;
  while (is_more) {
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    int received = 0;
    do {
      received = zmq_msg_recv(&frame, socket, ZMQ_DONTWAIT);
    } while (received < 0 && zmq_errno() == EINTR);
    if (received >= 0) frames.emplace_back(static_cast<const char*>(zmq_msg_data(&frame)), zmq_msg_size(&frame));
    is_more = received >= 0 && zmq_msg_more(&frame) != 0;
    zmq_msg_close(&frame);
  }
  return frames;
}

std::optional<PublicKey> shown_key(const Frames& request) {
  if (request.size() != kZapFrameCount || request[kVersion] != kZapVersion || request[kMechanism] != "CURVE" ||
      request[kKey].size() != kKeyBytes) {
    return std::nullopt;
  }
  return PublicKey(std::as_bytes(std::span(request[kKey])).first<kKeyBytes>());
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
    : context_(context),
      socket_(nullptr, &zmq_close),
      loop_("pk_keys", "which checks the keys of those who connect", *this) {}

Result<std::unique_ptr<Authenticator>> Authenticator::start(SocketContext& context) {
  auto authenticator = std::make_unique<Authenticator>(context);
  if (auto started = authenticator->loop_.start(); !started) return started.error();
  return authenticator;
}

std::unique_ptr<Authenticator::Domain> Authenticator::make_domain(AllowedKeys allowed) {
  MutexLock lock(mutex_);
  std::string name = "penstock-" + std::to_string(++domain_count_);
  domains_.emplace(name, std::move(allowed));
  return std::make_unique<Domain>(*this, std::move(name));
}

Authenticator::Domain::~Domain() {
  MutexLock lock(authenticator_.mutex_);
  authenticator_.domains_.erase(name_);
}

uint64_t Authenticator::refused_count() const {
  MutexLock lock(mutex_);
  return refused_count_;
}

std::optional<Role> Authenticator::look_up(const std::string& domain, const PublicKey& key) const {
  MutexLock lock(mutex_);
  const auto allowed = domains_.find(domain);
  if (allowed == domains_.end()) return std::nullopt;
  const auto found = allowed->second.find(key);
  if (found == allowed->second.end()) return std::nullopt;
  return found->second;
}

Result<void> Authenticator::health() const {
  MutexLock lock(mutex_);
  return failure_ ? Result<void>(*failure_) : Result<void>();
}

Result<void> Authenticator::begin() {
  socket_.reset(zmq_socket(context_.handle(), ZMQ_REP));
  const int zero = 0;
  if (socket_ && zmq_setsockopt(socket_.get(), ZMQ_LINGER, &zero, sizeof zero) == 0 &&
      zmq_bind(socket_.get(), kZapEndpoint) == 0)
    return {};
  const Error error{Errc::kFailed, std::string("starting to check keys failed: ") + zmq_strerror(zmq_errno())};
  socket_.reset();  // on the thread that made it
  return error;
}

Result<bool> Authenticator::wait(int wake_fd, bool may_sleep) {
  zmq_pollitem_t items[] = {{socket_.get(), 0, ZMQ_POLLIN, 0}, {nullptr, wake_fd, ZMQ_POLLIN, 0}};
  if (zmq_poll(items, 2, may_sleep ? -1 : 0) < 0 && zmq_errno() != EINTR)
    return Error{Errc::kFailed, std::string("waiting for keys to check failed: ") + zmq_strerror(zmq_errno())};
  return (items[1].revents & ZMQ_POLLIN) != 0;
}

void Authenticator::failed(Error error) {
  MutexLock lock(mutex_);
  failure_ = std::move(error);
}

// Answers one request: libzmq asks again only once it has its answer.
Result<void> Authenticator::serve() {
  void* const socket = socket_.get();
  const Frames request = receive_frames(socket);
  if (request.empty()) return {};
  const auto key = shown_key(request);
  const auto role = key ? look_up(request[kDomain], *key) : std::nullopt;
  if (!role) {
    MutexLock lock(mutex_);
    ++refused_count_;
  }
  const Frames reply = {std::string(kZapVersion),
                        request.size() > kRequestId ? request[kRequestId] : std::string(),
                        role ? "200" : "400",
                        role ? "OK" : "this key is not allowed here",
                        role ? PeerIdentity{.role = *role, .key = *key}.user_id() : std::string(),
                        std::string()};
  for (size_t index = 0; index < reply.size(); ++index) {
    const int more = index + 1 < reply.size() ? ZMQ_SNDMORE : 0;
    zmq_send(socket, reply[index].data(), reply[index].size(), ZMQ_DONTWAIT | more);
  }
  return {};
}

}  // namespace penstock::net
