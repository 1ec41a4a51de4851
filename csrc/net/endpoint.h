// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a socket of a pool listens or connects: tcp://HOST:PORT. HOST is an IPv4 address, an IPv6 address in brackets,
// or a name; for a bind also `*`, which is every interface.

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace penstock::net {

struct Endpoint {
  std::string host;   // without brackets
  uint16_t port = 0;  // of a bind, 0 is any free port

  static Result<Endpoint> parse(std::string_view text);

  // As `parse` reads it.
  std::string text() const;

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

// The one address that a bind to an endpoint uses.
struct BindAddress {
  std::string address;  // a number, or `*`; IPv6 without brackets
  bool is_ipv6 = false;
  bool is_loopback = false;
};

// A name is looked up, which can block; that the address is loopback is then known of the very one that is bound, and
// not of the name.
Result<BindAddress> resolve_bind_address(const Endpoint& endpoint);

// Why no address is known of a host, in the system's words; empty if one is. A name is looked up, which can block.
std::string lookup_failure(const std::string& host);

// Whether a host has IPv6 addresses only. A name is looked up, which can block; one that is not known counts as IPv4.
bool is_ipv6_host(const std::string& host);

}  // namespace penstock::net
