// SPDX-License-Identifier: Apache-2.0
#include "worker/watchdog.h"

#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <iterator>

namespace penstock::worker {
namespace {

constexpr auto kParentCheckInterval = std::chrono::milliseconds(200);

}  // namespace

Watchdog::Watchdog(int connection_fd, pid_t trainer_pid)
    : connection_fd_(connection_fd), trainer_(trainer_pid), loop_("pk_watchdog", "which monitors the trainer", *this) {}

Result<void> Watchdog::health() const {
  if (!is_closing_.load()) return {};
  if (auto ended = loop_.health(); !ended) return ended;
  return Fault{Errc::kClosed, "the trainer closed the connection"};
}

Result<void> Watchdog::serve() {
  const bool is_orphan = trainer_.is_gone();
  if (has_hung_up_) is_closing_.store(true);
  if (is_orphan && !has_hung_up_) hang_up();
  grace_.note(is_orphan);
  return {};
}

Result<bool> Watchdog::wait(int wake_fd, bool may_sleep) {
  // Once the peer has hung up, its descriptor stays readable forever, and only the parent's life matters.
  pollfd items[] = {{.fd = wake_fd, .events = POLLIN, .revents = 0},
                    {.fd = has_hung_up_ ? -1 : connection_fd_, .events = POLLRDHUP, .revents = 0}};
  ::poll(items, std::size(items), may_sleep ? static_cast<int>(kParentCheckInterval.count()) : 0);
  has_hung_up_ = has_hung_up_ || items[1].revents != 0;
  return items[0].revents != 0;
}

void Watchdog::hang_up() {
  is_closing_.store(true);
  ::shutdown(connection_fd_, SHUT_RDWR);
  has_hung_up_ = true;
}

}  // namespace penstock::worker
