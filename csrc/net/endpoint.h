// SPDX-License-Identifier: Apache-2.0
#pragma once
// The address on which a pool's socket listens, or to which it connects: tcp://HOST:PORT. HOST is an IPv4 address, an
// IPv6 address in brackets, or a name; for a bind also `*`, which means every interface.

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "net/host_address.h"

namespace penstock::net {

struct Endpoint {
  std::string host;   // without brackets
  uint16_t port = 0;  // for a bind, 0 is any free port

  static Result<Endpoint> parse(std::string_view text);

  // In the format that `parse` reads.
  std::string text() const;

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

// The single address that a bind to an endpoint uses. A name is looked up, which can block; whether the address is
// loopback is then determined for the address that is bound, and not for the name.
Result<HostAddress> resolve_bind_address(const Endpoint& endpoint);

}  // namespace penstock::net
