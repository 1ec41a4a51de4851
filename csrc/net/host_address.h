// SPDX-License-Identifier: Apache-2.0
#pragma once
// The address of a host as a number. libzmq is given numbers alone: it would look a name up on its own I/O thread,
// which serves every connection of the process.

#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"

namespace penstock::net {

struct HostAddress {
  std::string number;  // or `*` of a bind; IPv6 without brackets
  bool is_ipv6 = false;
  bool is_loopback = false;

  friend bool operator==(const HostAddress&, const HostAddress&) = default;
};

// Looks a host up: its first IPv4 address, else its first IPv6 address. A number is its own address. Can block for as
// long as the system's resolver does, many seconds where a name server is silent. kFailed with the system's words.
Result<HostAddress> look_up(const std::string& host);

// The address of a host that is a number; nothing for a name. Never blocks.
std::optional<HostAddress> address_of_number(const std::string& host);

// As libzmq reads it: tcp://NUMBER:PORT. Port 0 is any free port, for a bind.
std::string zmq_address(const HostAddress& address, uint16_t port);

}  // namespace penstock::net
