// SPDX-License-Identifier: Apache-2.0
#include "shm/channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace penstock::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kBacklog = 1024;
constexpr size_t kBufferBytes = 64 << 10;                  // holds hundreds of messages about batches
constexpr size_t kKeptBufferBytes = 1 << 20;               // a buffer that grew larger for a message is not kept
constexpr uint64_t kAllocatedUnseenBytes = 64 << 20;       // for a message, at most, before its bytes arrive
constexpr size_t kWaitingFdsMax = 2 * kMessageFdCountMax;  // of a partly received message and the next one
// The duration of one blocking system call, so that a wait for the next message usually takes one call and still ends
// on time. If less time is left, the wait uses poll().
constexpr milliseconds kSlice{50};

Fault failure(const std::string& what, int error_number) {
  const std::string text = what + " failed: " + std::strerror(error_number);
  switch (error_number) {
    case EPIPE:
    case ECONNRESET:
    case ECONNREFUSED:
    case ENOTCONN: return {Errc::kClosed, text};
    case EMFILE:
    case ENFILE:
    case ETOOMANYREFS: return {Errc::kNoMemory, text + "; raise the limit of open files (ulimit -n), or close files"};
    case ENOMEM:
    case ENOBUFS: return {Errc::kNoMemory, text + "; free memory"};
    default: return {Errc::kFailed, text};
  }
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

// A message being sent, and its bytes still to be sent.
class Outgoing {
 public:
  // The head and the parts must outlive this object.
  Outgoing(const MessageHead& head, Channel::Parts parts) {
    PENSTOCK_ASSERT(parts.size() <= Channel::kPartCountMax, "parts: ", parts.size());
    add(std::as_bytes(std::span(&head, 1)));
    for (const auto& part : parts) add(part);
  }

  size_t left() const { return left_; }

  // Sends until everything is sent or, without blocking, until the socket takes no more.
  Result<void> send(int fd, std::span<const int> fds, int flags) {
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMessageFdCountMax)> control;
    msghdr message{};
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(fds.size_bytes());
      std::memset(control.data(), 0, message.msg_controllen);
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size_bytes());
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
    }
    while (left_ > 0) {
      message.msg_iov = parts_.data() + first_;
      message.msg_iovlen = count_ - first_;
      const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | flags);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno == EAGAIN && (flags & MSG_DONTWAIT) != 0) return {};
      if (sent < 0) return failure("sending to the peer", errno);
      message.msg_control = nullptr;  // the first byte carried the descriptors
      message.msg_controllen = 0;
      advance(static_cast<size_t>(sent));
    }
    return {};
  }

  // Copies the next `count` bytes; at least that many must be left.
  std::vector<std::byte> copy_of_next(size_t count) const {
    std::vector<std::byte> bytes;
    bytes.reserve(count);
    for (size_t index = first_; bytes.size() < count; ++index) {
      const auto* begin = static_cast<const std::byte*>(parts_[index].iov_base);
      bytes.insert(bytes.end(), begin, begin + std::min(parts_[index].iov_len, count - bytes.size()));
    }
    return bytes;
  }

 private:
  void add(std::span<const std::byte> part) {
    if (part.empty()) return;
    parts_[count_++] = {.iov_base = const_cast<std::byte*>(part.data()), .iov_len = part.size()};
    left_ += part.size();
  }

  void advance(size_t bytes) {
    left_ -= bytes;
    while (bytes > 0) {
      iovec& part = parts_[first_];
      const size_t step = std::min(bytes, part.iov_len);
      part.iov_base = static_cast<std::byte*>(part.iov_base) + step;
      part.iov_len -= step;
      bytes -= step;
      if (part.iov_len == 0) ++first_;
    }
  }

  std::array<iovec, Channel::kPartCountMax + 1> parts_{};
  size_t first_ = 0;
  size_t count_ = 0;
  size_t left_ = 0;
};

Result<MessageHead> make_head(Channel::Parts parts, size_t fd_count) {
  PENSTOCK_ASSERT(fd_count <= kMessageFdCountMax, "descriptors: ", fd_count);
  MessageHead head{.fd_count = static_cast<uint32_t>(fd_count)};
  for (const auto& part : parts) head.bytes += part.size();
  if (head.bytes > kMessageBytesMax)
    return Fault{Errc::kTooLarge,
                 "a message to another process has " + std::to_string(head.bytes) + " bytes, but must have " +
                     std::to_string(kMessageBytesMax) +
                     " at most; provide shared memory (/dev/shm, the memory limit), or make batches smaller"};
  return head;
}

Fault malformed_message(const std::string& what) {
  return {Errc::kMalformed, "data from a channel is not a message of penstock: " + what +
                                "; trainer and workers must run the same version of penstock, and leave its "
                                "descriptors alone"};
}

Result<void> check(const MessageHead& head, uint64_t bytes_max) {
  if (head.magic != kMessageMagic) return malformed_message("it does not start with PNM1");
  if (head.fd_count > kMessageFdCountMax)
    return malformed_message("it names " + std::to_string(head.fd_count) + " file descriptors, but may name " +
                             std::to_string(kMessageFdCountMax));
  if (head.bytes > bytes_max)
    return malformed_message("it is " + std::to_string(head.bytes) + " bytes long, but may be " +
                             std::to_string(bytes_max));
  return {};
}

}  // namespace

Result<ChannelEnds> Channel::open_pair() {
  std::array<int, 2> fds{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) != 0)
    return failure("opening a socket for a worker", errno);
  return ChannelEnds{.here = FileDescriptor(fds[0]), .there = FileDescriptor(fds[1])};
}

Result<Channel> Channel::connect(const std::string& name, uint64_t received_bytes_max) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return failure("opening a socket", errno);
  const Address address = abstract_address(name);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0)
    return failure("connecting to a process of this machine", errno);
  if (!is_same_user(socket.get())) {
    return Fault{Errc::kClosed,
                 "the process that listens on the socket belongs to another user; no data was sent to it"};
  }
  return Channel(std::move(socket), received_bytes_max);
}

Result<void> Channel::send(Parts parts, std::span<const int> fds) {
  const auto head = make_head(parts, fds.size());
  if (!head) return head.error();
  PENSTOCK_ASSERT(!has_unsent(), "a message would overtake posted messages");
  return Outgoing(head.value(), parts).send(fd(), fds, 0);
}

Result<void> Channel::post(Parts parts) { return post(parts, nullptr); }

Result<void> Channel::post(std::shared_ptr<const std::vector<std::byte>> bytes) {
  const std::span<const std::byte> parts[] = {*bytes};
  return post(parts, std::move(bytes));
}

Result<void> Channel::post(Parts parts, std::shared_ptr<const std::vector<std::byte>> shared) {
  const auto head = make_head(parts, 0);
  if (!head) return head.error();
  if (auto checked = check_unsent(); !checked) return checked;
  Outgoing outgoing(head.value(), parts);
  if (!has_unsent()) {
    if (auto sent = outgoing.send(fd(), {}, MSG_DONTWAIT); !sent) return sent;
  }
  const size_t shared_left = shared ? std::min(outgoing.left(), shared->size()) : 0;
  if (const size_t own_left = outgoing.left() - shared_left; own_left > 0)
    keep(std::make_shared<const std::vector<std::byte>>(outgoing.copy_of_next(own_left)), 0);
  if (shared_left > 0) {
    const size_t begin = shared->size() - shared_left;
    keep(std::move(shared), begin);
  }
  return {};
}

Result<bool> Channel::try_send(Parts parts, std::span<const int> fds) {
  const auto head = make_head(parts, fds.size());
  if (!head) return head.error();
  if (has_unsent()) return false;
  Outgoing outgoing(head.value(), parts);
  const size_t all = outgoing.left();
  if (auto sent = outgoing.send(fd(), fds, MSG_DONTWAIT); !sent) return sent.error();
  if (outgoing.left() == all) return false;
  // The first byte carried the descriptors.
  if (outgoing.left() > 0)
    keep(std::make_shared<const std::vector<std::byte>>(outgoing.copy_of_next(outgoing.left())), 0);
  return true;
}

Result<void> Channel::check_unsent() const {
  if (unsent_bytes_ < kUnsentBytesMax) return {};
  return Fault{Errc::kTooLarge,
               std::to_string(unsent_bytes_) + " bytes wait for a worker that does not read them, but " +
                   std::to_string(kUnsentBytesMax) + " is the limit; check whether the worker hangs in its dataset"};
}

void Channel::keep(std::shared_ptr<const std::vector<std::byte>> bytes, size_t begin) {
  unsent_bytes_ += bytes->size() - begin;
  unsent_.push_back({.bytes = std::move(bytes), .begin = begin});
}

Result<void> Channel::flush() {
  while (has_unsent()) {
    Unsent& first = unsent_.front();
    const auto rest = std::span(*first.bytes).subspan(first.begin);
    const ssize_t sent = ::send(fd(), rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return {};
    if (sent < 0) {
      const int error_number = errno;
      unsent_.clear();
      unsent_bytes_ = 0;
      return failure("sending to the peer", error_number);
    }
    first.begin += static_cast<size_t>(sent);
    unsent_bytes_ -= static_cast<uint64_t>(sent);
    if (first.begin == first.bytes->size()) unsent_.pop_front();
  }
  return {};
}

Result<bool> Channel::fill(bool may_block) {
  if (fault_) return *fault_;
  make_room();
  iovec part{.iov_base = buffer_.data() + end_, .iov_len = buffer_.size() - end_};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMessageFdCountMax)> control;
  msghdr message{};
  ssize_t count = 0;
  do {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = CMSG_LEN(sizeof(int) * kMessageFdCountMax);  // without the room that alignment would add
    count = ::recvmsg(fd(), &message, MSG_CMSG_CLOEXEC | (may_block ? 0 : MSG_DONTWAIT));
  } while (count < 0 && errno == EINTR && !may_block);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count < 0) return failure("receiving from the peer", errno);
  size_t fd_count = 0;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&message); rights != nullptr; rights = CMSG_NXTHDR(&message, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const size_t end = rights->cmsg_len - CMSG_LEN(0);
    for (size_t offset = 0; offset < end; offset += sizeof(int), ++fd_count) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(rights) + offset, sizeof fd);
      fds_.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    if (fd_count >= kMessageFdCountMax)
      return fail(malformed_message("more than " + std::to_string(kMessageFdCountMax) +
                                    " file descriptors were received with one message"));
    return fail(
        {Errc::kNoMemory,
         "a file descriptor was lost in transit because this process has too many open files; raise `ulimit -n`"});
  }
  if (fds_.size() > kWaitingFdsMax)
    return fail(
        malformed_message(std::to_string(fds_.size()) + " file descriptors were received that no message names"));
  if (count == 0) return Fault{Errc::kClosed, "the peer closed the connection"};
  end_ += static_cast<size_t>(count);
  return true;
}

// Moves the bytes of an incomplete message to the start of the buffer.
void Channel::make_room() {
  if (begin_ == end_) {
    begin_ = end_ = 0;
    if (buffer_.empty() || buffer_.size() > kKeptBufferBytes) buffer_ = std::vector<std::byte>(kBufferBytes);
    return;
  }
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
  }
  if (end_ < buffer_.size()) return;
  MessageHead head;  // already checked by next()
  std::memcpy(&head, buffer_.data(), sizeof head);
  const uint64_t wanted = sizeof head + head.bytes;
  PENSTOCK_ASSERT(wanted > buffer_.size(), "more data was read before the received messages were returned");
  buffer_.resize(std::min(wanted, std::max<uint64_t>(kAllocatedUnseenBytes, uint64_t{2} * buffer_.size())));
}

Result<std::optional<Channel::Message>> Channel::next() {
  if (fault_) return *fault_;
  const size_t held = end_ - begin_;
  MessageHead head;
  if (held < sizeof head) return std::optional<Message>();
  std::memcpy(&head, buffer_.data() + begin_, sizeof head);
  if (auto checked = check(head, received_bytes_max_); !checked) return fail(checked.error());
  if (held - sizeof head < head.bytes) return std::optional<Message>();
  if (fds_.size() < head.fd_count)
    return fail(malformed_message("it names " + std::to_string(head.fd_count) + " file descriptors, but " +
                                  std::to_string(fds_.size()) + " were received"));
  const auto bytes = std::span<const std::byte>(buffer_).subspan(begin_ + sizeof head, head.bytes);
  begin_ += sizeof head + head.bytes;
  message_fds_.clear();
  for (uint32_t index = 0; index < head.fd_count; ++index) {
    message_fds_.push_back(std::move(fds_.front()));
    fds_.pop_front();
  }
  if (begin_ == end_ && !fds_.empty())
    return fail(
        malformed_message(std::to_string(fds_.size()) + " file descriptors were received that no message names"));
  return std::optional(Message{.bytes = bytes, .fds = message_fds_});
}

Result<Channel::Message> Channel::receive(steady_clock::time_point deadline) {
  for (;;) {
    const auto message = next();
    if (!message) return message.error();
    if (message.value()) return *message.value();
    const auto left = deadline - steady_clock::now();
    const bool may_block = left >= kSlice;
    if (may_block && !has_slices_) {
      const timeval slice{.tv_sec = 0, .tv_usec = std::chrono::microseconds(kSlice).count()};
      ::setsockopt(fd(), SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof slice);
      has_slices_ = true;
    }
    const auto filled = fill(may_block);
    if (!filled) return filled.error();
    if (filled.value() || may_block) continue;
    if (left <= steady_clock::duration(0)) return Fault{Errc::kTimeout, "no message was received before the deadline"};
    pollfd item{.fd = fd(), .events = POLLIN, .revents = 0};
    ::poll(&item, 1, static_cast<int>(std::chrono::ceil<milliseconds>(left).count()));  // a signal ends it early
  }
}

Fault Channel::fail(Fault fault) {
  fds_.clear();
  fault_ = fault;
  return fault;
}

void Channel::shut_down() { ::shutdown(fd(), SHUT_RDWR); }

Result<ChannelListener> ChannelListener::bind(const std::string& name) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return failure("opening a listening socket", errno);
  const Address address = abstract_address(name);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0)
    return failure("binding a socket", errno);
  if (::listen(socket.get(), kBacklog) != 0) return failure("listening on a socket", errno);
  return ChannelListener(std::move(socket));
}

Result<Channel> ChannelListener::accept(uint64_t received_bytes_max) {
  for (;;) {
    FileDescriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == ECONNABORTED) return Fault{Errc::kTimeout, "no client is waiting to connect"};
      return failure("accepting a connection", errno);
    }
    if (is_same_user(socket.get())) return Channel(std::move(socket), received_bytes_max);
  }
}

}  // namespace penstock::shm
