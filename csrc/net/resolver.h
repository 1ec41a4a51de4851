// SPDX-License-Identifier: Apache-2.0
#pragma once
// Looks hosts up for an I/O thread, which must not wait for the system's resolver: a name server that is silent for 5 s
// would hold up every link of a trainer for longer than a lease.
//
// An answer is kept for a while, so that the workers of one host are looked up once. Each lookup runs on a thread of
// its own, kLookupCountMax at a time; others wait for their turn. These threads are detached, as nothing can end a
// lookup that the system has begun, and a program that ends must not wait for it. They own all that they use.

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/instant.h"
#include "base/result.h"
#include "net/host_address.h"

namespace penstock::net {

inline constexpr size_t kLookupCountMax = 4;
inline constexpr size_t kKnownHostCountMax = 8192;  // twice the workers of a roster
inline constexpr Duration kAddressKept = std::chrono::seconds(10);
inline constexpr Duration kFailureKept = std::chrono::seconds(1);

// Confined to the thread that made it.
class Resolver {
 public:
  // Looks one host up, and may block. Called on several threads at once.
  using Lookup = std::function<Result<HostAddress>(const std::string& host)>;

  // kNoMemory where the process has no descriptor left.
  static Result<std::unique_ptr<Resolver>> open(Lookup lookup = look_up);

  struct State;
  // For `open`.
  explicit Resolver(std::shared_ptr<State> state);
  Resolver(const Resolver&) = delete;
  Resolver& operator=(const Resolver&) = delete;
  ~Resolver();

  // The address of `host`, or why it has none. Nothing while the host is looked up: the answer is there once
  // take_done() has named the host. Never blocks. An answer that is older than kAddressKept is asked for anew.
  std::optional<Result<HostAddress>> try_resolve(const std::string& host, Instant now);

  // Readable when a lookup has ended.
  int fd() const;
  // The hosts whose lookups have ended since the last call.
  std::vector<std::string> take_done();

 private:
  // Shared with the threads that look hosts up.
  const std::shared_ptr<State> state_;
};

}  // namespace penstock::net
