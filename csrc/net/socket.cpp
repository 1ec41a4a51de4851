// SPDX-License-Identifier: Apache-2.0
#include "net/socket.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/process.h"
#include "wire/control_record.h"

namespace penstock::net {
namespace {

// A trainer has one client for each worker of its roster, each local worker and the controller. A client takes three
// sockets, one of which libzmq creates itself.
constexpr int kClientSocketCount = 3;
constexpr int kOtherClientCountMax = 1024;
constexpr int kSocketCountMax = kClientSocketCount * (static_cast<int>(wire::kRosterCountMax) + kOtherClientCountMax);
// Two threads with a mailbox and an epoll each, the context's end, a socket, and spare ones for concurrent opens.
constexpr size_t kContextDescriptorCount = 8;

}  // namespace

SocketContext::SocketContext() { context_.set(zmq::ctxopt::max_sockets, kSocketCountMax); }

Result<std::unique_ptr<SocketContext>> SocketContext::open() {
  std::vector<FileDescriptor> room;
  while (room.size() < kContextDescriptorCount) {
    room.emplace_back(::eventfd(0, EFD_CLOEXEC));
    if (!room.back())
      return Fault{Errc::kNoMemory, "starting ZeroMQ failed: " + std::to_string(kContextDescriptorCount) +
                                        " file descriptors are needed, but only " + std::to_string(room.size() - 1) +
                                        " are left (" + std::strerror(errno) +
                                        "); raise the limit of open files (ulimit -n)"};
  }
  room.clear();
  auto context = std::make_unique<SocketContext>();
  // The first socket starts the threads.
  const auto started =
      try_zmq("starting ZeroMQ", [&] { const zmq::socket_t first(context->zmq(), zmq::socket_type::pair); });
  if (!started) return started.error();
  return context;
}

std::string zmq_version() {
  const auto [major, minor, patch] = zmq::version();
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

Result<void> wait_readable(std::span<const Waitable> sockets, std::span<const int> fds, std::span<bool> is_fd_readable,
                           std::chrono::milliseconds timeout) {
  PENSTOCK_ASSERT(fds.size() == is_fd_readable.size());
  std::vector<zmq::pollitem_t> items;
  items.reserve(sockets.size() + fds.size());
  for (Waitable socket : sockets) items.push_back({socket.socket_.handle(), 0, ZMQ_POLLIN, 0});
  for (int fd : fds) items.push_back({nullptr, fd, ZMQ_POLLIN, 0});
  for (bool& flag : is_fd_readable) flag = false;
  try {
    zmq::poll(items, timeout);
  } catch (const zmq::error_t& error) {
    if (error.num() == EINTR) return {};
    return Fault{Errc::kFailed, std::string("waiting for peers failed: ") + error.what()};
  }
  for (size_t index = 0; index < fds.size(); ++index) {
    is_fd_readable[index] = items[sockets.size() + index].revents != 0;
  }
  return {};
}

namespace {

constexpr int kEventsPerWait = 64;  // limit of one system call; the next call returns further events first

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
    member.sockets.push_back(socket.socket_);
    const auto got = try_zmq("getting a file descriptor",
                             [&] { member.fds.push_back(member.sockets.back().get(zmq::sockopt::fd)); });
    if (!got) return got.error();
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
  for (const zmq::socket_ref socket : member.sockets) {
    int events = 0;
    const auto got = try_zmq("getting the events of a socket", [&] { events = socket.get(zmq::sockopt::events); });
    if (!got) return got.error();
    // The others are queried after the resulting use.
    if ((events & ZMQ_POLLIN) != 0) return true;
  }
  return false;
}

Result<std::span<const uint64_t>> ReadySet::wait(std::chrono::milliseconds timeout) {
  ready_tags_.clear();
  for (const uint64_t tag : used_) {
    const auto has = has_input(members_.at(tag));
    if (!has) return has.error();
    if (has.value()) ready_tags_.push_back(tag);
  }
  for (const uint64_t tag : used_) members_.at(tag).is_used = false;
  used_.clear();
  // Also if a message is waiting already: a socket that is always ready must not hide the others.
  std::array<epoll_event, kEventsPerWait> events;
  const int64_t timeout_ms =
      ready_tags_.empty() ? std::min<int64_t>(timeout.count(), std::numeric_limits<int>::max()) : 0;
  const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsPerWait, static_cast<int>(timeout_ms));
  if (count < 0 && errno != EINTR)
    return Fault{Errc::kFailed, std::string("waiting for peers failed: ") + std::strerror(errno)};
  for (int index = 0; index < count; ++index) ready_tags_.push_back(events[static_cast<size_t>(index)].data.u64);
  std::sort(ready_tags_.begin(), ready_tags_.end());
  ready_tags_.erase(std::unique(ready_tags_.begin(), ready_tags_.end()), ready_tags_.end());
  for (const uint64_t tag : ready_tags_) mark_used(tag);
  return std::span<const uint64_t>(ready_tags_);
}

namespace {

constexpr int kClientEvents = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED |
                              ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                              ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
constexpr int kListenerEvents =
    ZMQ_EVENT_LISTENING | ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_ACCEPT_FAILED | ZMQ_EVENT_DISCONNECTED;
constexpr size_t kEventBytes = 6;  // u16 event, u32 value; a second part names the endpoint

// Reads all parts of the next message; returns whether there was one and it was an event.
bool try_receive_event(zmq::socket_t& socket, std::array<std::byte, kEventBytes>& event) {
  bool is_event = false;
  bool is_more = true;
  zmq::message_t part;
  for (int index = 0; is_more; ++index) {
    zmq::recv_result_t received;
    const auto done = try_zmq("receiving an event", [&] { received = socket.recv(part, zmq::recv_flags::dontwait); });
    is_more = done && received && part.more();
    if (index > 0 || !done || received != kEventBytes) continue;
    std::memcpy(event.data(), part.data(), kEventBytes);
    is_event = true;
  }
  return is_event;
}

// Why a server ended the connection during the key exchange, as far as the client can know.
std::string closed_reason(uint32_t error_number) {
  return std::string("the connection closed during the key exchange (") +
         std::strerror(static_cast<int>(error_number)) +
         "): the server has a different key than expected, is shutting down, or closed the connection because too many "
         "clients without a key connect; both sides must have keys from the same folder, created by penstock keys";
}

std::string protocol_reason(uint32_t detail) {
  if (detail == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) {
    return "the server does not use CURVE; connect only to penstock servers";
  }
  if (detail == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC) {
    return "the server has a different key than expected; both sides must have keys from the same folder, created by "
           "penstock keys";
  }
  return "the server does not use ZeroMQ's protocol, or not this version of it; connect only to penstock servers";
}

std::string key_reason(uint32_t status) {
  return "the server does not accept this key (status " + std::to_string(status) +
         "): it has other keys, or its role may not connect there; both sides must have keys from the same folder, "
         "created by penstock keys";
}

}  // namespace

Result<std::unique_ptr<SocketMonitor>> SocketMonitor::watch(SocketContext& context, zmq::socket_ref watched,
                                                            int kinds) {
  const std::string endpoint = "inproc://" + make_endpoint_name();
  zmq::socket_t events;
  const auto opened =
      try_zmq("opening a monitor", [&] { events = zmq::socket_t(context.zmq(), zmq::socket_type::pair); });
  if (!opened) return opened.error();
  auto monitor = std::make_unique<SocketMonitor>(std::move(events), watched);
  // If a monitor's queue is full, libzmq's I/O thread blocks, and with it every connection of the process. The queue is
  // therefore unlimited. A client has one event for each attempt to connect; a server's events are read by a dedicated
  // thread, and libzmq takes far longer to generate an event than that thread takes to read it. cppzmq's monitor_t has
  // no such queue: it connects its socket before a limit could be set.
  const auto watching = try_zmq("watching a connection", [&] {
    monitor->events_.set(zmq::sockopt::rcvhwm, 0);
    monitor->events_.set(zmq::sockopt::linger, 0);
    if (zmq_socket_monitor(watched.handle(), endpoint.c_str(), kinds) != 0) throw zmq::error_t();
    monitor->events_.connect(endpoint);
  });
  if (!watching) return watching.error();
  return monitor;
}

SocketMonitor::~SocketMonitor() {
  // A closed socket lives on in libzmq until its connection has ended, and would then report that. Without a reader,
  // libzmq's I/O thread would wait forever, and with it every connection of the context.
  zmq_socket_monitor(watched_.handle(), nullptr, 0);
}

std::optional<SocketMonitor::Event> SocketMonitor::try_event() {
  std::array<std::byte, kEventBytes> bytes{};
  if (!try_receive_event(events_, bytes)) return std::nullopt;
  Event event;
  std::memcpy(&event.kind, bytes.data(), sizeof event.kind);
  std::memcpy(&event.value, bytes.data() + sizeof event.kind, sizeof event.value);
  return event;
}

Result<std::unique_ptr<ConnectionMonitor>> ConnectionMonitor::watch(SocketContext& context, zmq::socket_ref watched) {
  auto monitor = SocketMonitor::watch(context, watched, kClientEvents);
  if (!monitor) return monitor.error();
  return std::make_unique<ConnectionMonitor>(std::move(monitor).value());
}

std::optional<ConnectionEvent> ConnectionMonitor::try_event() {
  while (const auto told = monitor_->try_event()) {
    if (auto event = read_event(*told)) return event;
  }
  return std::nullopt;
}

std::optional<ConnectionEvent> ConnectionMonitor::read_event(const SocketMonitor::Event& event) {
  using Kind = ConnectionEvent::Kind;
  switch (event.kind) {
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED: is_connected_ = true; return ConnectionEvent{.kind = Kind::kConnected};
    case ZMQ_EVENT_DISCONNECTED:
      // Also reported when a connection ends whose handshake had failed, which was reported before.
      if (!is_connected_) return std::nullopt;
      is_connected_ = false;
      return ConnectionEvent{.kind = Kind::kDisconnected};
    case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
      return ConnectionEvent{.kind = Kind::kRefused, .reason = closed_reason(event.value)};
    case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
      // Also reported for a message that was damaged in transit. The connection has then ended, which is not reported
      // again.
      if (std::exchange(is_connected_, false)) return ConnectionEvent{.kind = Kind::kDisconnected};
      return ConnectionEvent{.kind = Kind::kRefused, .reason = protocol_reason(event.value), .is_final = true};
    case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
      return ConnectionEvent{.kind = Kind::kRefused, .reason = key_reason(event.value), .is_final = true};
    default: return std::nullopt;
  }
}

Result<std::unique_ptr<ListenerMonitor>> ListenerMonitor::watch(SocketContext& context, zmq::socket_ref watched) {
  auto monitor = SocketMonitor::watch(context, watched, kListenerEvents);
  if (!monitor) return monitor.error();
  return std::make_unique<ListenerMonitor>(std::move(monitor).value());
}

std::optional<ListenerEvent> ListenerMonitor::try_event() {
  using Kind = ListenerEvent::Kind;
  const auto event = monitor_->try_event();
  if (!event) return std::nullopt;
  const int value = static_cast<int>(event->value);
  switch (event->kind) {
    case ZMQ_EVENT_LISTENING: return ListenerEvent{.kind = Kind::kListening, .value = value};
    case ZMQ_EVENT_ACCEPTED: return ListenerEvent{.kind = Kind::kAccepted, .value = value};
    case ZMQ_EVENT_ACCEPT_FAILED: return ListenerEvent{.kind = Kind::kRefused, .value = value};
    default: return ListenerEvent{.kind = Kind::kEnded, .value = value};  // ZMQ_EVENT_DISCONNECTED
  }
}

}  // namespace penstock::net
