// SPDX-License-Identifier: Apache-2.0
#include "net/readiness.h"

#include <zmq.h>

#include <cerrno>
#include <string>
#include <vector>

namespace penstock::net {

Result<void> wait_readable(std::span<const Waitable> sockets, std::span<const int> fds, std::span<bool> is_fd_readable,
                           std::chrono::milliseconds timeout) {
  PENSTOCK_ASSERT(fds.size() == is_fd_readable.size());
  std::vector<zmq_pollitem_t> items;
  items.reserve(sockets.size() + fds.size());
  for (const Waitable& socket : sockets) items.push_back({socket.socket_, 0, ZMQ_POLLIN, 0});
  for (int fd : fds) items.push_back({nullptr, fd, ZMQ_POLLIN, 0});
  const int ready = zmq_poll(items.data(), static_cast<int>(items.size()), timeout.count());
  for (bool& flag : is_fd_readable) flag = false;
  if (ready < 0) {
    if (zmq_errno() == EINTR) return {};
    return Fault{Errc::kFailed, std::string("waiting for peers failed: ") + zmq_strerror(zmq_errno())};
  }
  for (size_t index = 0; index < fds.size(); ++index) {
    is_fd_readable[index] = items[sockets.size() + index].revents != 0;
  }
  return {};
}

}  // namespace penstock::net
