// SPDX-License-Identifier: Apache-2.0
#include "net/stranger_guard.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/process.h"
#include "base/result.h"
#include "net/socket.h"

namespace penstock::net {

ConnectionBudget::Limits ConnectionBudget::limits_under(uint64_t descriptor_limit, size_t sharer_count) {
  const auto count = static_cast<size_t>(std::clamp<uint64_t>(descriptor_limit / kDescriptorsForEach / sharer_count,
                                                              kStageConnectionsMin, kStageConnectionsMax));
  return {.stage_count_max = count, .address_count_max = count / kAddressPart};
}

void ConnectionBudget::add(int id, const Address& address, Instant now) {
  PENSTOCK_ASSERT(!has(id), "connection ", id, " already exists");
  put(id, {.stage = HandshakeStage::kSilent, .address = address, .accepted_at = now});
}

void ConnectionBudget::put(int id, const Place& place) {
  Stage& its = at(place.stage);
  its.queues[place.address].push_back({.id = id, .accepted_at = place.accepted_at});
  ++its.count;
  places_.emplace(id, place);
}

void ConnectionBudget::advance(int id, HandshakeStage stage) {
  Place place = places_.at(id);
  PENSTOCK_ASSERT(stage > place.stage, "a handshake cannot return to an earlier stage");
  place.stage = stage;
  remove(id);
  put(id, place);
}

void ConnectionBudget::remove(int id) {
  const auto place = places_.find(id);
  PENSTOCK_ASSERT(place != places_.end(), "unknown connection ", id);
  Stage& its = at(place->second.stage);
  const auto queue = its.queues.find(place->second.address);
  std::erase_if(queue->second, [id](const Connection& connection) { return connection.id == id; });
  if (queue->second.empty()) its.queues.erase(queue);
  --its.count;
  places_.erase(place);
}

const ConnectionBudget::Queue& ConnectionBudget::longest_of(const Stage& stage) {
  const auto goes_first = [](const auto& a, const auto& b) {
    if (a.second.size() != b.second.size()) return a.second.size() > b.second.size();
    return a.second.front().accepted_at < b.second.front().accepted_at;
  };
  return std::min_element(stage.queues.begin(), stage.queues.end(), goes_first)->second;
}

std::optional<int> ConnectionBudget::surplus() const {
  for (const Stage& stage : stages_) {
    if (stage.count == 0) continue;
    const Queue& queue = longest_of(stage);
    if (stage.count > limits_.stage_count_max || queue.size() > limits_.address_count_max) return queue.front().id;
  }
  return std::nullopt;
}

std::optional<int> ConnectionBudget::first() const {
  for (const Stage& stage : stages_) {
    if (stage.count > 0) return longest_of(stage).front().id;
  }
  return std::nullopt;
}

std::vector<int> ConnectionBudget::overdue(Instant now) const {
  std::vector<int> ids;
  for (size_t index = 0; index < kHandshakeStageCount; ++index) {
    const Stage& stage = stages_[index];
    const bool is_pressed = stage.count * 4 > limits_.stage_count_max * 3;
    const Duration time = is_pressed ? kStageTimes[index] / 2 : kStageTimes[index];
    for (const auto& [address, queue] : stage.queues) {
      for (const Connection& connection : queue) {
        if (now - connection.accepted_at >= time) ids.push_back(connection.id);
      }
    }
  }
  return ids;
}

HolderBudget::Limits HolderBudget::limits_under(uint64_t descriptor_limit, const HolderRoom& room) {
  PENSTOCK_ASSERT(room.count_max >= kHoldersMin && room.descriptors_for_each > 0);
  const auto count = static_cast<size_t>(
      std::clamp<uint64_t>(descriptor_limit / room.descriptors_for_each, kHoldersMin, room.count_max));
  const size_t quiet_count = count / kQuietPart;
  return {.known_count_max = count - quiet_count,
          .key_count_max = (count - quiet_count) / kKeyPart,
          .quiet_count_max = quiet_count,
          .quiet_address_count_max = quiet_count / kAddressPart};
}

void HolderBudget::add(int id, const Address& address) {
  PENSTOCK_ASSERT(!has(id), "connection ", id, " already exists");
  put(id, {.is_quiet = true, .group = std::string(address.begin(), address.end()), .order = ++added_count_});
}

void HolderBudget::speak(int id, std::string_view key) {
  Place place = places_.at(id);
  place.is_quiet = false;
  place.group = key;
  remove(id);
  put(id, std::move(place));
}

void HolderBudget::put(int id, Place place) {
  Part& part = part_of(place);
  part.queues[place.group].emplace(place.order, id);
  ++part.count;
  places_.emplace(id, std::move(place));
}

void HolderBudget::remove(int id) {
  const auto place = places_.find(id);
  PENSTOCK_ASSERT(place != places_.end(), "unknown connection ", id);
  Part& part = part_of(place->second);
  const auto queue = part.queues.find(place->second.group);
  queue->second.erase(place->second.order);
  if (queue->second.empty()) part.queues.erase(queue);
  --part.count;
  places_.erase(place);
}

int HolderBudget::first_of_longest(const Part& part) {
  const auto goes_first = [](const auto& a, const auto& b) {
    if (a.second.size() != b.second.size()) return a.second.size() > b.second.size();
    return a.second.begin()->first < b.second.begin()->first;
  };
  return std::min_element(part.queues.begin(), part.queues.end(), goes_first)->second.begin()->second;
}

std::optional<int> HolderBudget::surplus(int id) const {
  if (const auto place = places_.find(id); place != places_.end()) {
    const bool is_quiet = place->second.is_quiet;
    const Queue& queue = (is_quiet ? quiet_ : known_).queues.at(place->second.group);
    if (queue.size() > (is_quiet ? limits_.quiet_address_count_max : limits_.key_count_max))
      return queue.begin()->second;
  }
  if (quiet_.count > limits_.quiet_count_max) return first_of_longest(quiet_);
  if (known_.count > limits_.known_count_max) return first_of_longest(known_);
  return std::nullopt;
}

namespace {

constexpr int kEventsPerTurn = 1024;
constexpr auto kSweepInterval = std::chrono::milliseconds(250);

bool has_no_descriptors(int error_number) { return error_number == EMFILE || error_number == ENFILE; }

Fault no_descriptor() {
  return {Errc::kNoMemory, std::string("watching for connections without a key failed: no file descriptor is left (") +
                               std::strerror(errno) + "); raise the limit of open files (ulimit -n)"};
}

// Whether this process has a descriptor left now.
bool has_descriptor() { return static_cast<bool>(FileDescriptor(::eventfd(0, EFD_CLOEXEC))); }

uint16_t port_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) return reinterpret_cast<const sockaddr_in&>(address).sin_port;
  return reinterpret_cast<const sockaddr_in6&>(address).sin6_port;
}

ConnectionBudget::Address address_of(const sockaddr_storage& address) {
  ConnectionBudget::Address bytes{};
  if (address.ss_family == AF_INET) {
    const in_addr& ip = reinterpret_cast<const sockaddr_in&>(address).sin_addr;
    bytes[10] = bytes[11] = 0xff;
    std::memcpy(bytes.data() + 12, &ip, sizeof ip);
  } else {
    const in6_addr& ip = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    const bool is_ipv4 = IN6_IS_ADDR_V4MAPPED(&ip);
    std::memcpy(bytes.data(), &ip, is_ipv4 ? sizeof ip : sizeof ip / 2);
  }
  return bytes;
}

std::optional<uint16_t> local_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return std::nullopt;
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return std::nullopt;
  return port_of(address);
}

// The number of bytes sent on a connection, each counted once. 0 also if the system does not count them: Linux does
// since 4.19, and gVisor does not.
uint64_t sent_bytes(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return 0;
  if (length < offsetof(tcp_info, tcpi_bytes_retrans) + sizeof info.tcpi_bytes_retrans) return 0;
  return info.tcpi_bytes_sent - info.tcpi_bytes_retrans;
}

// Whether the system still accepts connections that send bytes while its queue is full of silent ones. If not, silent
// strangers would block all others from a port that waits for first bytes.
bool has_syn_cookies() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_syncookies");
  int mode = 0;
  return file >> mode && mode > 0;
}

// Ends a connection of which libzmq has a descriptor, too. The peer is sent a reset once libzmq has closed its
// descriptor, so the system need not remember the connection: after 10,000 a second its table would be full.
void end_connection(int fd) {
  const linger reset{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  ::shutdown(fd, SHUT_RDWR);
}

}  // namespace

StrangerGuard::StrangerGuard(SocketContext& context, zmq::socket_ref watched, const HandshakeBytes& bytes,
                             const PortUse& use)
    : context_(context),
      watched_(watched),
      bytes_(bytes),
      budget_(ConnectionBudget::limits_under(descriptor_limit(), use.sharer_count)),
      holders_(HolderBudget::limits_under(descriptor_limit() / use.sharer_count, use.holders)),
      loop_("pk_strangers", "which closes connections without a key", *this) {}

Result<std::unique_ptr<StrangerGuard>> StrangerGuard::start(SocketContext& context, zmq::socket_ref watched,
                                                            const HandshakeBytes& bytes, const PortUse& use) {
  auto guard = std::make_unique<StrangerGuard>(context, watched, bytes, use);
  if (auto started = guard->loop_.start(); !started) return started.error();
  return guard;
}

Result<void> StrangerGuard::begin() {
  auto monitor = ListenerMonitor::watch(context_, watched_);
  if (!monitor) return monitor.error();
  monitor_ = std::move(monitor).value();
  slot_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC));
  spare_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC));
  return slot_ && spare_ ? Result<void>() : no_descriptor();
}

void StrangerGuard::end() {
  monitor_.reset();
  own_.clear();
  for (FileDescriptor* fd : {&slot_, &spare_, &listener_}) fd->reset();
}

Result<bool> StrangerGuard::wait(int wake_fd, bool may_sleep) {
  const std::array<Waitable, 1> sockets{monitor_->waitable()};
  const std::array<int, 1> fds{wake_fd};
  std::array<bool, 1> is_readable{};
  std::optional<Instant> due;
  if (!budget_.is_empty()) due = swept_at_ + kSweepInterval;
  const auto timeout = may_sleep ? wait_time(due, clock_now()) : std::chrono::milliseconds(0);
  if (auto waited = wait_readable(sockets, fds, is_readable, timeout); !waited) return waited.error();
  return is_readable[0];
}

Result<void> StrangerGuard::serve() {
  const Instant now = clock_now();
  {
    MutexLock lock(mutex_);
    std::ranges::move(notes_, std::back_inserter(taken_notes_));
    notes_.clear();
  }
  bool is_all = false;
  for (int count = 0; count < kEventsPerTurn && !is_all; ++count) {
    const auto event = monitor_->try_event();
    is_all = !event;
    if (event) {
      if (auto taken = take(*event, now); !taken) return taken;
    }
  }
  if (is_all) {
    for (const Note& note : std::exchange(taken_notes_, {})) take_note(note);
  }
  if (now - swept_at_ < kSweepInterval) return {};
  swept_at_ = now;
  for (const int fd : budget_.overdue(now)) judge(fd);
  return {};
}

Result<void> StrangerGuard::take(const ListenerEvent& event, Instant now) {
  switch (event.kind) {
    case ListenerEvent::Kind::kListening: return keep_listener(event.value);
    case ListenerEvent::Kind::kAccepted: take_in(event.value, now); break;
    case ListenerEvent::Kind::kEnded:
      // The peer is not notified until our duplicate is closed, too.
      forget(event.value);
      break;
    case ListenerEvent::Kind::kRefused:
      // libzmq retries immediately, and forever, until there is a descriptor or no connection waits to be accepted.
      if (!has_no_descriptors(event.value) || has_descriptor()) break;
      if (const auto first = budget_.first()) {
        judge(*first);
      } else {
        turn_away();
      }
  }
  return {};
}

Result<void> StrangerGuard::keep_listener(int fd) {
  listener_ = FileDescriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!listener_) return no_descriptor();
  port_ = local_port(listener_.get()).value_or(0);
  // For turn_away(), which must not wait for a connection that libzmq has accepted in the meantime.
  const int flags = ::fcntl(listener_.get(), F_GETFL);
  if (flags >= 0) ::fcntl(listener_.get(), F_SETFL, flags | O_NONBLOCK);
  // If this fails, libzmq accepts silent connections immediately, and the budget bounds them like all others.
  const int seconds = static_cast<int>(kSilentTime.count());
  if (has_syn_cookies()) ::setsockopt(listener_.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof seconds);
  return {};
}

void StrangerGuard::take_in(int fd, Instant now) {
  forget(fd);
  FileDescriptor own = duplicate(fd);
  if (!own) return close_at_once(fd);
  // libzmq may have closed the connection since, and its number may have been reused.
  if (local_port(own.get()) != port_) return;
  const auto peer = peer_of(own.get());
  if (!peer) return;
  budget_.add(fd, peer->address, now);
  peers_.emplace(fd, *peer);
  own_.insert_or_assign(fd, std::move(own));
  while (const auto surplus = budget_.surplus()) judge(*surplus);
}

FileDescriptor StrangerGuard::duplicate(int fd) {
  for (;;) {
    FileDescriptor own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (own || !has_no_descriptors(errno)) return own;
    const auto first = budget_.first();
    if (!first) return own;
    judge(*first);
  }
}

void StrangerGuard::judge(int fd) {
  const int own = own_.at(fd).get();
  const auto bytes = progress(own);
  // If the system counts no bytes, connections cannot be distinguished, and libzmq's handshake timeout must suffice.
  if (!bytes) return forget(fd);
  if (*bytes >= bytes_.let_in) return let_in(fd);
  const auto stage = *bytes >= bytes_.knowing    ? HandshakeStage::kKeyKnown
                     : *bytes >= bytes_.greeting ? HandshakeStage::kGreeting
                                                 : HandshakeStage::kSilent;
  if (stage > budget_.stage_of(fd)) return budget_.advance(fd, stage);
  end_connection(own);
  forget(fd);
}

void StrangerGuard::forget(int fd) {
  if (budget_.has(fd)) budget_.remove(fd);
  if (holders_.has(fd)) holders_.remove(fd);
  own_.erase(fd);
  peers_.erase(fd);
}

void StrangerGuard::let_in(int fd) {
  budget_.remove(fd);
  own_.erase(fd);
  holders_.add(fd, peers_.at(fd).address);
  make_room(fd);
}

void StrangerGuard::note_holder(int fd, std::string_view key) {
  const auto peer = peer_of(fd);
  if (!peer) return;  // it has ended
  {
    MutexLock lock(mutex_);
    notes_.push_back({.fd = fd, .name = peer->name, .key = std::string(key)});
  }
  loop_.wake();
}

// libzmq reports a connection before it passes on its messages. However, the connection may have ended since, and its
// number may have been reused. If that happened before the message was read, the new connection is attributed to the
// same holder until it sends a message itself.
void StrangerGuard::take_note(const Note& note) {
  const auto peer = peers_.find(note.fd);
  if (peer == peers_.end() || peer->second.name != note.name) return;
  if (budget_.has(note.fd)) {
    const auto bytes = progress(own_.at(note.fd).get());
    if (bytes && *bytes < bytes_.let_in) return;
    let_in(note.fd);
  }
  if (!holders_.has(note.fd)) return;
  holders_.speak(note.fd, note.key);
  make_room(note.fd);
}

void StrangerGuard::make_room(int fd) {
  while (const auto surplus = holders_.surplus(fd)) close_holder(*surplus);
}

void StrangerGuard::close_holder(int fd) {
  if (::dup3(fd, slot_.get(), O_CLOEXEC) >= 0) {
    const auto peer = peer_of(slot_.get());
    if (local_port(slot_.get()) == port_ && peer && peer->name == peers_.at(fd).name) end_connection(slot_.get());
    ::dup3(listener_.get(), slot_.get(), O_CLOEXEC);
  }
  forget(fd);
}

std::optional<StrangerGuard::Peer> StrangerGuard::peer_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return std::nullopt;
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return std::nullopt;
  Peer peer{.address = address_of(address), .name = {}};
  const uint16_t port = port_of(address);
  std::memcpy(peer.name.data(), &port, sizeof port);
  if (address.ss_family == AF_INET)
    std::ranges::copy(peer.address, peer.name.begin() + sizeof port);
  else
    std::memcpy(peer.name.data() + sizeof port, &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr,
                sizeof(in6_addr));
  return peer;
}

std::optional<uint64_t> StrangerGuard::progress(int own) {
  const uint64_t bytes = sent_bytes(own);
  counts_bytes_ = counts_bytes_ || bytes > 0;
  return counts_bytes_ ? std::optional(bytes) : std::nullopt;
}

void StrangerGuard::close_at_once(int fd) {
  if (::dup3(fd, slot_.get(), O_CLOEXEC) < 0) return;
  if (local_port(slot_.get()) == port_) {
    const auto bytes = progress(slot_.get());
    if (bytes && *bytes < bytes_.let_in) end_connection(slot_.get());
  }
  ::dup3(listener_.get(), slot_.get(), O_CLOEXEC);
}

void StrangerGuard::turn_away() {
  spare_.reset();
  FileDescriptor accepted(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (accepted) {
    end_connection(accepted.get());
    ::dup3(listener_.get(), accepted.get(), O_CLOEXEC);
    spare_ = std::move(accepted);
  } else {
    spare_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC));
  }
}

}  // namespace penstock::net
