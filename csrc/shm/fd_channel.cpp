// SPDX-License-Identifier: Apache-2.0
#include "shm/fd_channel.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>

namespace penstock::shm {
namespace {

constexpr int kBacklog = 1024;  // every worker of a loader may connect before the trainer accepts the first

Fault system_error(const std::string& what, int error_number) {
  const Errc code =
      error_number == EMFILE || error_number == ENFILE || error_number == ENOMEM ? Errc::kNoMemory : Errc::kClosed;
  return {code, what + " failed: " + std::strerror(error_number)};
}

struct Address {
  sockaddr_un value{};
  socklen_t length = 0;
};

// An abstract address: the first byte of the path is zero, the rest is the name.
Address abstract_address(const std::string& name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof(address.value.sun_path) - 1);
  std::memcpy(address.value.sun_path + 1, name.data(), length);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

bool is_same_user(int fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == ::geteuid();
}

}  // namespace

FdMessage link_message(uint64_t trainer_id, uint32_t link) {
  FdMessage message{.kind = kFdLink};
  const std::string text = std::to_string(trainer_id) + " " + std::to_string(link);
  text.copy(message.text, sizeof message.text - 1);
  return message;
}

Result<FdConnection> FdConnection::connect(const std::string& name) {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) return system_error("opening a socket for descriptors", errno);
  const Address address = abstract_address(name);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0) {
    return system_error("connecting to the trainer", errno);
  }
  if (!is_same_user(fd.get())) {
    return Fault{Errc::kClosed, "the process at the trainer's address belongs to another user; nothing was sent to it"};
  }
  return FdConnection(std::move(fd));
}

Result<void> FdConnection::send(const FdMessage& message, int passed_fd) {
  iovec part{.iov_base = const_cast<FdMessage*>(&message), .iov_len = sizeof message};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr head{};
  head.msg_iov = &part;
  head.msg_iovlen = 1;
  if (passed_fd >= 0) {
    head.msg_control = control.data();
    head.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&head);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &passed_fd, sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(fd_.get(), &head, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(sizeof message)) return system_error("passing a descriptor", errno);
  return {};
}

Result<FdConnection::Received> FdConnection::receive(std::chrono::steady_clock::time_point deadline) {
  using std::chrono::duration_cast;
  using std::chrono::milliseconds;
  for (;;) {
    const auto left = duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd item{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    const int ready = ::poll(&item, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1'000'000)));
    if (ready > 0) break;
    if (ready < 0 && errno != EINTR) return system_error("waiting for a descriptor", errno);
    if (left.count() <= 0) return Fault{Errc::kTimeout, "no descriptor came before the deadline"};
  }
  Received received;
  iovec part{.iov_base = &received.message, .iov_len = sizeof received.message};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr head{};
  head.msg_iov = &part;
  head.msg_iovlen = 1;
  head.msg_control = control.data();
  head.msg_controllen = control.size();
  ssize_t count = 0;
  do {
    count = ::recvmsg(fd_.get(), &head, MSG_CMSG_CLOEXEC);
  } while (count < 0 && errno == EINTR);
  if (count == 0) return Fault{Errc::kClosed, "the peer closed the connection"};
  if (count < 0) return system_error("receiving a descriptor", errno);
  size_t fd_count = 0;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&head); rights != nullptr; rights = CMSG_NXTHDR(&head, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    // Alignment leaves room for a second descriptor. Whatever came is owned at once, and closed when another follows.
    const size_t end = rights->cmsg_len - CMSG_LEN(0);
    for (size_t offset = 0; offset < end; offset += sizeof(int), ++fd_count) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(rights) + offset, sizeof fd);
      received.fd = FileDescriptor(fd);
    }
  }
  if (fd_count == 0 && (head.msg_flags & MSG_CTRUNC) != 0) {
    return Fault{Errc::kNoMemory,
                 "a descriptor was lost on its way because this process has too many open files; raise `ulimit -n`"};
  }
  if (count != sizeof received.message || received.message.magic != FdMessage{}.magic || fd_count > 1 ||
      (head.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return Fault{Errc::kMalformed, "a message on the descriptor socket is not penstock's: " + std::to_string(count) +
                                       " bytes and " + std::to_string(fd_count) +
                                       " descriptors came; trainer and workers must run the same version of penstock"};
  }
  return received;
}

void FdConnection::shut_down() { ::shutdown(fd_.get(), SHUT_RDWR); }

Result<FdListener> FdListener::bind(const std::string& name) {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return system_error("opening a socket for workers", errno);
  const Address address = abstract_address(name);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0) {
    return system_error("binding a socket for workers", errno);
  }
  if (::listen(fd.get(), kBacklog) != 0) return system_error("listening for workers", errno);
  return FdListener(std::move(fd));
}

void FdListener::shut_down() {
  ::shutdown(fd_.get(), SHUT_RDWR);
  while (auto waiting = accept()) waiting.value().shut_down();
}

Result<FdConnection> FdListener::accept() {
  for (;;) {
    FileDescriptor fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == ECONNABORTED) return Fault{Errc::kTimeout, "no worker is waiting to connect"};
      return system_error("accepting a worker", errno);
    }
    if (is_same_user(fd.get())) return FdConnection(std::move(fd));
  }
}

}  // namespace penstock::shm
