// SPDX-License-Identifier: Apache-2.0
#pragma once
// A TCP connection by hand, as a stranger at a server's port has it.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/file_descriptor.h"

namespace penstock::test {

// Confined to one thread.
class TcpConnection {
 public:
  // `source` is the address to connect from, one of 127.0.0.0/8.
  explicit TcpConnection(uint16_t port, uint32_t source = INADDR_LOOPBACK)
      : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (source != INADDR_LOOPBACK) {
      const sockaddr_in own = address_of(source, 0);
      EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own), 0);
    }
    const sockaddr_in address = address_of(INADDR_LOOPBACK, port);
    // A server that has no room may have closed it before the call returns.
    const bool is_connected = ::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    EXPECT_TRUE(is_connected || errno == ECONNRESET) << std::strerror(errno);
  }

  // Returns false when the other side is gone.
  bool try_send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      bytes = bytes.subspan(static_cast<size_t>(count));
    }
    return true;
  }

  // The next `size` bytes, or fewer when the other side is gone or says nothing for half a minute.
  std::vector<std::byte> receive(size_t size) {
    std::vector<std::byte> bytes;
    while (bytes.size() < size) {
      pollfd item{.fd = fd_.get(), .events = POLLIN, .revents = 0};
      if (::poll(&item, 1, 30'000) <= 0) break;
      std::array<std::byte, 4096> some{};
      const ssize_t count = ::recv(fd_.get(), some.data(), std::min(some.size(), size - bytes.size()), 0);
      if (count <= 0) break;
      bytes.insert(bytes.end(), some.begin(), some.begin() + count);
    }
    return bytes;
  }

  // Reads on until the other side closes the connection; false when it does not within half a minute.
  bool wait_closed() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (std::chrono::steady_clock::now() < deadline) {
      pollfd item{.fd = fd_.get(), .events = POLLIN, .revents = 0};
      if (::poll(&item, 1, 30'000) <= 0) return false;
      std::array<std::byte, 4096> some{};
      if (::recv(fd_.get(), some.data(), some.size(), 0) <= 0) return true;
    }
    return false;
  }

  // Whether the other side has closed the connection by now. Drops what has come.
  bool is_closed() {
    std::array<std::byte, 4096> some{};
    ssize_t count = 0;
    do {
      count = ::recv(fd_.get(), some.data(), some.size(), MSG_DONTWAIT);
    } while (count > 0 || (count < 0 && errno == EINTR));
    return count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
  }

 private:
  static sockaddr_in address_of(uint32_t ip, uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(ip);
    return address;
  }

  FileDescriptor fd_;
};

}  // namespace penstock::test
