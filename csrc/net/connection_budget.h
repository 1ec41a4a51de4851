// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides which connections a server closes to make room: among the connections that have shown no key, the oldest one
// of the address that has the most. Each stage of a handshake has separate room, so connections that send no bytes do
// not displace connections that make progress. The budget only decides; it owns no connections.
//
// Closing the oldest connection and not the newest serves honest peers that share an address with a stranger, such as
// loopback: they reach the next stage within milliseconds, and the connections that stay behind are closed.

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

// The handshake progress of a connection that has not shown an allowed key.
enum class HandshakeStage : uint8_t {
  kSilent,    // it has not sent the first bytes of ZeroMQ's protocol
  kGreeting,  // it has sent them
  kKnowing,   // it has shown that it knows the server's key
};
constexpr size_t kHandshakeStageCount = 3;

// For each stage, the time after a connection was accepted by which it must have reached the next stage. Half of that
// while more than three quarters of the stage's room are taken.
constexpr std::array<std::chrono::milliseconds, kHandshakeStageCount> kStageTimes = {
    std::chrono::milliseconds(2000), std::chrono::milliseconds(3000), std::chrono::milliseconds(5000)};

// The room of a stage at one server: a sixteenth of the process's descriptor limit, within these bounds. A connection
// takes two descriptors, and a worker has two servers, one of which has two stages: at least three eighths of the
// descriptors remain, regardless of the number of strangers, except for connections that libzmq accepts before the
// guard's thread runs. Workers that share a process share that sixteenth; the minimum is for each.
constexpr size_t kStageConnectionsMax = 128;
constexpr size_t kStageConnectionsLeast = 4;
constexpr uint64_t kDescriptorsForEach = 16;
// The share of one address: room / kAddressPart.
constexpr size_t kAddressPart = 2;

// Thread-compatible.
class ConnectionBudget {
 public:
  struct Limits {
    size_t stage_count_max = kStageConnectionsMax;
    size_t address_count_max = kStageConnectionsMax / kAddressPart;  // in a stage
  };
  // `sharer_count`: the number of workers that have a server of this kind in this process.
  static Limits limits_under(uint64_t descriptor_limit, size_t sharer_count = 1);

  // The address of a peer. IPv4 addresses are mapped to IPv6; of IPv6 only the first 64 bits count, as a peer has a
  // whole network.
  using Address = std::array<uint8_t, 16>;

  explicit ConnectionBudget(const Limits& limits) : limits_(limits) {}

  // A connection was accepted. `id` is unique among the connections here.
  void add(int id, const Address& address, Instant now);
  // The connection has reached a later stage.
  void advance(int id, HandshakeStage stage);
  // The connection has ended, or shown its key.
  void remove(int id);

  bool has(int id) const { return places_.contains(id); }
  bool is_empty() const { return places_.empty(); }
  HandshakeStage stage_of(int id) const { return places_.at(id).stage; }

  // The connection to close, unless it has meanwhile reached a later stage, because there are too many. None if there
  // is room for all.
  std::optional<int> surplus() const;
  // The connection to close first if any must be closed.
  std::optional<int> first() const;
  // The connections whose time in their stage is over.
  std::vector<int> overdue(Instant now) const;

 private:
  struct Connection {
    int id;
    Instant accepted_at;
  };
  using Queue = std::deque<Connection>;  // in the order in which they reached the stage
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
  // The longest queue of a non-empty stage; of equally long ones, the queue whose first connection is oldest.
  static const Queue& longest_of(const Stage& stage);

  const Limits limits_;
  std::array<Stage, kHandshakeStageCount> stages_;
  std::map<int, Place> places_;  // by id
};

}  // namespace penstock::net
