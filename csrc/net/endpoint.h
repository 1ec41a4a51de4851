// SPDX-License-Identifier: Apache-2.0
#pragma once
// Endpoint, the address on which a pool's socket listens, or to which it connects: tcp://HOST:PORT. HOST is an IPv4
// address, an IPv6 address in brackets, or a name; for a bind also `*`, which means every interface. look_up() and
// Resolver find the numeric address of a host. libzmq receives only those: it would look up a name on its I/O thread,
// which serves every connection of the process.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/result.h"

namespace penstock::net {

struct Endpoint {
  std::string host;   // without brackets
  uint16_t port = 0;  // for a bind, 0 is any free port

  static Result<Endpoint> parse(std::string_view text);

  // In the format that `parse` reads.
  std::string text() const;

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

// The numeric address of a host.
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

// The single address that a bind to an endpoint uses. A name is looked up, which can block; whether the address is
// loopback is then determined for the address that is bound, and not for the name.
Result<HostAddress> resolve_bind_address(const Endpoint& endpoint);

inline constexpr size_t kLookupCountMax = 4;
inline constexpr size_t kKnownHostCountMax = 8192;  // twice the workers of a roster
inline constexpr Duration kAddressKept = std::chrono::seconds(10);
inline constexpr Duration kFailureKept = std::chrono::seconds(1);

// Looks up hosts for an I/O thread, which must not wait for the system's resolver: a name server that does not answer
// for 5 s would delay every link of a trainer for longer than a lease.
//
// An answer is cached for a while, so that the host of several workers is looked up once. Each lookup runs on a
// separate thread, kLookupCountMax at a time; further lookups are queued. These threads are detached, since a started
// lookup cannot be cancelled, and a program that exits must not wait for it. They own everything that they use.
//
// Confined to the thread that created it.
class Resolver {
 public:
  // Looks up one host, and may block. Called on several threads concurrently.
  using Lookup = std::function<Result<HostAddress>(const std::string& host)>;

  // kNoMemory if the process has no descriptor left.
  static Result<std::unique_ptr<Resolver>> open(Lookup lookup = look_up);

  struct State;
  // For `open`.
  explicit Resolver(std::shared_ptr<State> state);
  Resolver(const Resolver&) = delete;
  Resolver& operator=(const Resolver&) = delete;
  ~Resolver();

  // The address of `host`, or why it has none. None while the host is looked up: the answer is available once
  // take_done() has returned the host. Never blocks. An answer older than kAddressKept is looked up again.
  std::optional<Result<HostAddress>> try_resolve(const std::string& host, Instant now);

  // Readable when a lookup has completed.
  int fd() const;
  // The hosts whose lookups have completed since the last call.
  std::vector<std::string> take_done();

 private:
  // Shared with the lookup threads.
  const std::shared_ptr<State> state_;
};

}  // namespace penstock::net
