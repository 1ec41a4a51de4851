// SPDX-License-Identifier: Apache-2.0
#include "net/socket.h"

#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <cerrno>
#include <cstring>

#include "base/file_descriptor.h"
#include "net/zmq_failure.h"
#include "wire/control_record.h"

namespace penstock::net {
namespace {

// A trainer has a client for each worker of its roster, of its own ones and for the controller. A client takes three
// sockets, of which libzmq itself makes one.
constexpr int kClientSocketCount = 3;
constexpr int kOtherClientCountMax = 1024;
constexpr int kSocketCountMax = kClientSocketCount * (static_cast<int>(wire::kRosterCountMax) + kOtherClientCountMax);
// Two threads with a mailbox and an epoll each, the context's end, a socket, and some for who else opens any meanwhile.
constexpr size_t kContextDescriptorCount = 8;
// A name in the abstract namespace is free again once its trainer is dead, and everybody on the machine could see it:
// who connects again may meet a process of another user there.
constexpr int kNeverAgain = -1;

// A peer that takes no more is gone.
Fault peer_failure(const std::string& what) {
  const bool is_gone = zmq_errno() == EAGAIN;
  Fault fault = zmq_failure(what);
  if (is_gone) fault.code = Errc::kClosed;
  return fault;
}

Result<std::unique_ptr<Socket>> open(void* context, const std::string& name, bool is_bound) {
  void* raw = zmq_socket(context, ZMQ_DEALER);
  if (raw == nullptr) return peer_failure("opening a ZeroMQ socket");
  auto socket = std::make_unique<Socket>(raw);
  const int zero = 0;
  const int one = 1;
  const uid_t user = ::geteuid();
  bool is_set = zmq_setsockopt(raw, ZMQ_LINGER, &zero, sizeof zero) == 0;
  is_set = is_set && zmq_setsockopt(raw, ZMQ_SNDHWM, &zero, sizeof zero) == 0;
  is_set = is_set && zmq_setsockopt(raw, ZMQ_RCVHWM, &zero, sizeof zero) == 0;
  is_set = is_set && zmq_setsockopt(raw, ZMQ_IMMEDIATE, &one, sizeof one) == 0;
  is_set = is_set && zmq_setsockopt(raw, ZMQ_RECONNECT_IVL, &kNeverAgain, sizeof kNeverAgain) == 0;
  if (is_bound) is_set = is_set && zmq_setsockopt(raw, ZMQ_IPC_FILTER_UID, &user, sizeof user) == 0;
  if (!is_set) return peer_failure("setting up a ZeroMQ socket");
  const std::string endpoint = "ipc://@" + name;
  if ((is_bound ? zmq_bind(raw, endpoint.c_str()) : zmq_connect(raw, endpoint.c_str())) != 0) {
    return peer_failure((is_bound ? "binding " : "connecting to ") + endpoint);
  }
  return socket;
}

}  // namespace

std::string zmq_version() {
  int major = 0;
  int minor = 0;
  int patch = 0;
  ::zmq_version(&major, &minor, &patch);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

SocketContext::SocketContext() : context_(zmq_ctx_new()) {
  PENSTOCK_ASSERT(context_ != nullptr, "zmq_ctx_new: ", zmq_strerror(zmq_errno()));
  PENSTOCK_ASSERT(zmq_ctx_set(context_, ZMQ_MAX_SOCKETS, kSocketCountMax) == 0);
}

Result<std::unique_ptr<SocketContext>> SocketContext::open() {
  std::vector<FileDescriptor> room;
  while (room.size() < kContextDescriptorCount) {
    room.emplace_back(::eventfd(0, EFD_CLOEXEC));
    if (!room.back())
      return Fault{Errc::kNoMemory, "starting ZeroMQ failed: " + std::to_string(kContextDescriptorCount) +
                                        " descriptors are needed, and no more than " + std::to_string(room.size() - 1) +
                                        " are left (" + std::strerror(errno) +
                                        "); raise the limit of open files (ulimit -n)"};
  }
  room.clear();
  auto context = std::make_unique<SocketContext>();
  void* first = zmq_socket(context->handle(), ZMQ_PAIR);  // with which the threads start
  if (first == nullptr) return peer_failure("starting ZeroMQ");
  zmq_close(first);
  return context;
}

SocketContext::~SocketContext() {
  while (zmq_ctx_term(context_) != 0 && zmq_errno() == EINTR) {
  }
}

Result<std::unique_ptr<Socket>> Socket::bind(SocketContext& context, const std::string& name) {
  return open(context.handle(), name, /*is_bound=*/true);
}

Result<std::unique_ptr<Socket>> Socket::connect(SocketContext& context, const std::string& name) {
  return open(context.handle(), name, /*is_bound=*/false);
}

Socket::~Socket() { zmq_close(socket_); }

Result<void> Socket::send(std::span<const std::span<const std::byte>> parts) {
  for (size_t index = 0; index < parts.size(); ++index) {
    const int more = index + 1 < parts.size() ? ZMQ_SNDMORE : 0;
    int sent = 0;
    do {
      sent = zmq_send(socket_, parts[index].data(), parts[index].size(), ZMQ_DONTWAIT | more);
    } while (sent < 0 && zmq_errno() == EINTR);
    if (sent < 0) return peer_failure("sending to the peer");
  }
  return {};
}

Result<bool> Socket::try_receive(MessageParts& parts) {
  size_t count = 0;
  bool is_more = true;
  while (is_more) {
    zmq_msg_t message;
    zmq_msg_init(&message);
    int received = 0;
    do {
      received = zmq_msg_recv(&message, socket_, ZMQ_DONTWAIT);
    } while (received < 0 && zmq_errno() == EINTR);
    if (received < 0) {
      const bool is_empty = zmq_errno() == EAGAIN;
      if (is_empty && count == 0) {
        zmq_msg_close(&message);
        return false;
      }
      auto error = peer_failure("receiving from the peer");
      zmq_msg_close(&message);
      return error;
    }
    if (parts.size() <= count) parts.emplace_back();
    const auto* bytes = static_cast<const std::byte*>(zmq_msg_data(&message));
    parts[count].assign(bytes, bytes + zmq_msg_size(&message));
    ++count;
    is_more = zmq_msg_more(&message) != 0;
    zmq_msg_close(&message);
  }
  parts.resize(count);
  return true;
}

bool Socket::has_peer() const {
  int events = 0;
  size_t length = sizeof events;
  // Without high-water marks a socket is writable exactly while it has a peer.
  return zmq_getsockopt(socket_, ZMQ_EVENTS, &events, &length) == 0 && (events & ZMQ_POLLOUT) != 0;
}

Result<void> Socket::wait_writable(std::chrono::milliseconds timeout) {
  zmq_pollitem_t item{socket_, 0, ZMQ_POLLOUT, 0};
  if (zmq_poll(&item, 1, timeout.count()) < 0 && zmq_errno() != EINTR) return peer_failure("waiting for the peer");
  return {};
}

Result<void> Socket::wait(std::span<Socket* const> sockets, std::span<const int> fds, std::span<bool> is_fd_readable,
                          std::chrono::milliseconds timeout) {
  std::vector<Waitable> waitables;
  waitables.reserve(sockets.size());
  for (Socket* socket : sockets) waitables.push_back(socket->waitable());
  return wait_readable(waitables, fds, is_fd_readable, timeout);
}

}  // namespace penstock::net
