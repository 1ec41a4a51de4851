// SPDX-License-Identifier: Apache-2.0
#include "net/ready_set.h"

#include <sys/epoll.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "net/zmq_failure.h"

namespace penstock::net {
namespace {

constexpr int kToldInOneCall = 64;  // limit of one system call; the next call returns further events first

}  // namespace

Result<std::unique_ptr<ReadySet>> ReadySet::open() {
  FileDescriptor epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) {
    return Fault{Errc::kNoMemory, std::string("epoll_create1 failed: ") + std::strerror(errno) +
                                      "; raise the limit of open files (ulimit -n)"};
  }
  return std::make_unique<ReadySet>(std::move(epoll));
}

Result<uint64_t> ReadySet::add(std::span<const Waitable> sockets) {
  Member member;
  for (const Waitable& socket : sockets) {
    int fd = -1;
    size_t length = sizeof fd;
    if (zmq_getsockopt(socket.socket_, ZMQ_FD, &fd, &length) != 0) return zmq_failure("getting a file descriptor");
    member.sockets.push_back(socket.socket_);
    member.fds.push_back(fd);
  }
  return add(std::move(member));
}

Result<uint64_t> ReadySet::add(int fd) { return add(Member{.sockets = {}, .fds = {fd}}); }

Result<uint64_t> ReadySet::add(Member member) {
  const uint64_t tag = next_tag_++;
  for (size_t index = 0; index < member.fds.size(); ++index) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = tag}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, member.fds[index], &event) == 0) continue;
    const int error_number = errno;
    while (index > 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, member.fds[--index], nullptr);
    return Fault{Errc::kNoMemory, "waiting for one more file descriptor in addition to the descriptors of " +
                                      std::to_string(members_.size()) +
                                      " others failed: " + std::strerror(error_number) +
                                      "; raise fs.epoll.max_user_watches, or use fewer connections"};
  }
  members_.emplace(tag, std::move(member));
  mark_used(tag);
  return tag;
}

Result<void> ReadySet::watch_output(uint64_t tag, bool is_watched) {
  const Member& member = members_.at(tag);
  PENSTOCK_ASSERT(member.sockets.empty());
  epoll_event event{.events = EPOLLIN, .data = {.u64 = tag}};
  if (is_watched) event.events |= EPOLLOUT;
  for (const int fd : member.fds)
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0)
      return Fault{Errc::kFailed, std::string("epoll_ctl failed: ") + std::strerror(errno)};
  return {};
}

void ReadySet::remove(uint64_t tag) {
  const auto found = members_.find(tag);
  if (found == members_.end()) return;
  for (const int fd : found->second.fds) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  if (found->second.is_used) std::erase(used_, tag);
  members_.erase(found);
}

void ReadySet::mark_used(uint64_t tag) {
  const auto found = members_.find(tag);
  if (found == members_.end() || found->second.sockets.empty())
    return;  // epoll reports plain descriptors again by itself
  if (std::exchange(found->second.is_used, true)) return;
  used_.push_back(tag);
}

Result<bool> ReadySet::has_input(const Member& member) const {
  for (void* socket : member.sockets) {
    int events = 0;
    size_t length = sizeof events;
    int asked = 0;
    do {
      asked = zmq_getsockopt(socket, ZMQ_EVENTS, &events, &length);
    } while (asked != 0 && zmq_errno() == EINTR);
    if (asked != 0) return zmq_failure("getting the events of a socket");
    // The others are queried after the resulting use.
    if ((events & ZMQ_POLLIN) != 0) return true;
  }
  return false;
}

Result<std::span<const uint64_t>> ReadySet::wait(std::chrono::milliseconds timeout) {
  told_.clear();
  for (const uint64_t tag : used_) {
    const auto has = has_input(members_.at(tag));
    if (!has) return has.error();
    if (has.value()) told_.push_back(tag);
  }
  for (const uint64_t tag : used_) members_.at(tag).is_used = false;
  used_.clear();
  // Also if a message is waiting already: a socket that is always ready must not hide the others.
  std::array<epoll_event, kToldInOneCall> events;
  const int64_t timeout_ms = told_.empty() ? std::min<int64_t>(timeout.count(), std::numeric_limits<int>::max()) : 0;
  const int count = ::epoll_wait(epoll_.get(), events.data(), kToldInOneCall, static_cast<int>(timeout_ms));
  if (count < 0 && errno != EINTR)
    return Fault{Errc::kFailed, std::string("waiting for peers failed: ") + std::strerror(errno)};
  for (int index = 0; index < count; ++index) told_.push_back(events[static_cast<size_t>(index)].data.u64);
  std::sort(told_.begin(), told_.end());
  told_.erase(std::unique(told_.begin(), told_.end()), told_.end());
  for (const uint64_t tag : told_) mark_used(tag);
  return std::span<const uint64_t>(told_);
}

}  // namespace penstock::net
