// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which connections a server closes to make room: of those that have shown no key, the oldest one of the address that
// has the most. Each stage of a handshake has room of its own, so that connections that send nothing do not displace
// those that go on. It decides, and owns no connection.
//
// Closing the oldest one and not the newest is what serves honest peers at the address of a stranger, such as loopback:
// they go on to the next stage within milliseconds, and those that stay behind are closed.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "base/instant.h"

namespace penstock::net {

// How far a connection has come that has not shown an allowed key.
enum class HandshakeStage : uint8_t {
  kSilent,    // it has not sent the first bytes of ZeroMQ's protocol
  kGreeting,  // it has sent these
  kKnowing,   // it has shown that it knows the server's key
};
constexpr size_t kHandshakeStageCount = 3;

// In each stage, by which time after a connection was accepted it must have reached the next one. Half of that while
// more than three quarters of the stage's room are taken.
constexpr std::array<std::chrono::milliseconds, kHandshakeStageCount> kStageTimes = {
    std::chrono::milliseconds(2000), std::chrono::milliseconds(3000), std::chrono::milliseconds(5000)};

// The room of a stage at one server: a sixteenth of what the process may have open, within these bounds. A connection
// takes two descriptors, and a worker has two servers, of which one has two stages: at least three eighths of the
// descriptors are left, however many strangers connect, but for what libzmq accepts before the guard's thread runs.
// Workers that share a process share that sixteenth; the least is for each.
constexpr size_t kStageConnectionsMax = 128;
constexpr size_t kStageConnectionsLeast = 4;
constexpr uint64_t kDescriptorsForEach = 16;
// One address has this part of it.
constexpr size_t kAddressPart = 2;

// Thread-compatible.
class ConnectionBudget {
 public:
  struct Limits {
    size_t stage_count_max = kStageConnectionsMax;
    size_t address_count_max = kStageConnectionsMax / kAddressPart;  // in a stage
  };
  // `sharer_count` is of those that have a server of the kind in this process.
  static Limits limits_under(uint64_t descriptor_limit, size_t sharer_count = 1);

  // Of a peer. IPv4 is written as IPv6 does it; of IPv6 the first 64 bits count, as a peer has a network of its own.
  using Address = std::array<uint8_t, 16>;

  explicit ConnectionBudget(const Limits& limits) : limits_(limits) {}

  // A connection was accepted. `id` is a number that no other one here has.
  void add(int id, const Address& address, Instant now);
  // It has come to a later stage.
  void advance(int id, HandshakeStage stage);
  // It has ended, or shown its key.
  void remove(int id);

  bool has(int id) const { return places_.contains(id); }
  bool is_empty() const { return places_.empty(); }
  HandshakeStage stage_of(int id) const { return places_.at(id).stage; }

  // The connection that is to go, or to be found in a later stage by now, as there are too many. Nothing if there is
  // room for all.
  std::optional<int> surplus() const;
  // The one that is to go first if any must.
  std::optional<int> first() const;
  // Those whose time in their stage is over.
  std::vector<int> overdue(Instant now) const;

 private:
  struct Connection {
    int id;
    Instant accepted_at;
  };
  using Queue = std::deque<Connection>;  // in the order of their coming to the stage
  struct Stage {
    std::map<Address, Queue> queues;  // none is empty
    size_t count = 0;
  };
  struct Place {
    HandshakeStage stage;
    Address address;
    Instant accepted_at;
  };

  Stage& at(HandshakeStage stage) { return stages_[static_cast<size_t>(stage)]; }
  void put(int id, const Place& place);
  // The longest queue of a stage that is not empty; of equal ones that of the connection which came first.
  static const Queue& longest_of(const Stage& stage);

  const Limits limits_;
  std::array<Stage, kHandshakeStageCount> stages_;
  std::map<int, Place> places_;  // by id
};

}  // namespace penstock::net
