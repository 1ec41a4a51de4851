// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a socket of a pool listens or connects: tcp://HOST:PORT. HOST is an IPv4 address, an IPv6 address in brackets,
// or a name; for a bind also `*`, which is every interface.

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "net/host_address.h"

namespace penstock::net {

struct Endpoint {
  std::string host;   // without brackets
  uint16_t port = 0;  // of a bind, 0 is any free port

  static Result<Endpoint> parse(std::string_view text);

  // As `parse` reads it.
  std::string text() const;

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

// The one address that a bind to an endpoint uses. A name is looked up, which can block; that the address is loopback
// is then known of the very one that is bound, and not of the name.
Result<HostAddress> resolve_bind_address(const Endpoint& endpoint);

}  // namespace penstock::net
