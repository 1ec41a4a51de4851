// SPDX-License-Identifier: Apache-2.0
#include "net/host_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <memory>

namespace penstock::net {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// The addresses of a host, or the system's error number in `error` if there are none.
AddressList addresses_of(const std::string& host, int flags, int& error) {
  addrinfo wanted{};
  wanted.ai_flags = flags;
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  error = ::getaddrinfo(host.c_str(), nullptr, &wanted, &found);
  return {error == 0 ? found : nullptr, &::freeaddrinfo};
}

HostAddress ipv4_address(const sockaddr* address) {
  sockaddr_in value{};
  std::memcpy(&value, address, sizeof value);
  std::array<char, INET_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET, &value.sin_addr, text.data(), text.size());
  return {.number = text.data(), .is_loopback = ntohl(value.sin_addr.s_addr) >> 24 == 127};
}

HostAddress ipv6_address(const sockaddr* address) {
  sockaddr_in6 value{};
  std::memcpy(&value, address, sizeof value);
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET6, &value.sin6_addr, text.data(), text.size());
  const bool is_mapped_loopback = IN6_IS_ADDR_V4MAPPED(&value.sin6_addr) && value.sin6_addr.s6_addr[12] == 127;
  return {.number = text.data(),
          .is_ipv6 = true,
          .is_loopback = IN6_IS_ADDR_LOOPBACK(&value.sin6_addr) || is_mapped_loopback};
}

const sockaddr* first_of_family(const AddressList& list, int family) {
  for (const addrinfo* each = list.get(); each != nullptr; each = each->ai_next) {
    if (each->ai_family == family) return each->ai_addr;
  }
  return nullptr;
}

// The first IPv4 address, or else the first IPv6 address.
std::optional<HostAddress> first_of(const AddressList& list) {
  if (const sockaddr* address = first_of_family(list, AF_INET); address != nullptr) return ipv4_address(address);
  if (const sockaddr* address = first_of_family(list, AF_INET6); address != nullptr) return ipv6_address(address);
  return std::nullopt;
}

}  // namespace

Result<HostAddress> look_up(const std::string& host) {
  int error = 0;
  if (const auto address = first_of(addresses_of(host, 0, error))) return *address;
  return Fault{Errc::kFailed, error == 0 ? "it has no TCP address" : ::gai_strerror(error)};
}

std::optional<HostAddress> address_of_number(const std::string& host) {
  int error = 0;
  return first_of(addresses_of(host, AI_NUMERICHOST, error));
}

std::string zmq_address(const HostAddress& address, uint16_t port) {
  const std::string host = address.is_ipv6 ? "[" + address.number + "]" : address.number;
  return "tcp://" + host + ":" + (port == 0 ? "*" : std::to_string(port));
}

}  // namespace penstock::net
