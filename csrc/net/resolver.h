// SPDX-License-Identifier: Apache-2.0
#pragma once
// Looks up hosts for an I/O thread, which must not wait for the system's resolver: a name server that does not answer
// for 5 s would delay every link of a trainer for longer than a lease.
//
// An answer is cached for a while, so that the host of several workers is looked up once. Each lookup runs on a
// separate thread, kLookupCountMax at a time; further lookups are queued. These threads are detached, since a started
// lookup cannot be cancelled, and a program that exits must not wait for it. They own everything that they use.

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
