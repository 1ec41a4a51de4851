// SPDX-License-Identifier: Apache-2.0
#include "net/authenticator.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <future>
#include <iostream>
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

Result<std::unique_ptr<Authenticator>> Authenticator::start(SocketContext& context) {
  FileDescriptor wake_fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_fd) return Error{Errc::kNoMemory, std::string("opening an eventfd failed: ") + std::strerror(errno)};
  auto authenticator = std::make_unique<Authenticator>(std::move(wake_fd));
  std::promise<Result<void>> started;
  auto outcome = started.get_future();
  // The thread keeps its side of the promise, which it may still be in when the value has been seen here.
  authenticator->thread_ =
      std::jthread([self = authenticator.get(), handle = context.handle(), started = std::move(started)](
                       const std::stop_token& stop) mutable { self->run(stop, handle, started); });
  if (auto is_started = outcome.get(); !is_started) return is_started.error();
  return authenticator;
}

Authenticator::~Authenticator() {
  thread_.request_stop();
  const uint64_t one = 1;
  static_cast<void>(!::write(wake_fd_.get(), &one, sizeof one));
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

void Authenticator::run(const std::stop_token& stop, void* context, std::promise<Result<void>>& started) {
  ::pthread_setname_np(::pthread_self(), "pk_keys");
  const std::unique_ptr<void, int (*)(void*)> socket(zmq_socket(context, ZMQ_REP), &zmq_close);
  const int zero = 0;
  if (!socket || zmq_setsockopt(socket.get(), ZMQ_LINGER, &zero, sizeof zero) != 0 ||
      zmq_bind(socket.get(), kZapEndpoint) != 0) {
    started.set_value(Error{Errc::kFailed, std::string("starting to check keys failed: ") + zmq_strerror(zmq_errno())});
    return;
  }
  started.set_value({});
  try {
    serve(stop, socket.get());
  } catch (const std::exception& error) {
    // Without an answer every client is refused, and libzmq tells nobody why.
    std::cerr << "penstock: the thread pk_keys, which checks the keys of those who connect, failed: " << error.what()
              << "; nobody is let in any more\n";
  }
}

void Authenticator::serve(const std::stop_token& stop, void* socket) {
  while (!stop.stop_requested()) {
    zmq_pollitem_t items[] = {{socket, 0, ZMQ_POLLIN, 0}, {nullptr, wake_fd_.get(), ZMQ_POLLIN, 0}};
    // A context that ends under it, or memory that ran out: without an answer every client is refused.
    if (zmq_poll(items, 2, -1) < 0 && zmq_errno() != EINTR) return;
    if ((items[0].revents & ZMQ_POLLIN) != 0) answer(socket);
  }
}

void Authenticator::answer(void* socket) {
  const Frames request = receive_frames(socket);
  if (request.empty()) return;
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
}

}  // namespace penstock::net
