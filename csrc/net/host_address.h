// SPDX-License-Identifier: Apache-2.0
#pragma once
// The numeric address of a host. libzmq receives only numeric addresses: it would look up a name on its I/O thread,
// which serves every connection of the process.

#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"

namespace penstock::net {

struct HostAddress {
  std::string number;  // or `*` for a bind; IPv6 without brackets
  bool is_ipv6 = false;
  bool is_loopback = false;

  friend bool operator==(const HostAddress&, const HostAddress&) = default;
};

// Looks up a host: its first IPv4 address, or else its first IPv6 address. A numeric host is its own address. Can block
// for as long as the system's resolver does, many seconds if a name server does not answer. kFailed with the system's
// message.
Result<HostAddress> look_up(const std::string& host);

// The address of a numeric host; none for a name. Never blocks.
std::optional<HostAddress> address_of_number(const std::string& host);

// In the format that libzmq reads: tcp://NUMBER:PORT. Port 0 is any free port, for a bind.
std::string zmq_address(const HostAddress& address, uint16_t port);

}  // namespace penstock::net
