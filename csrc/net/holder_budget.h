// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides which admitted connections a server closes to make room. If there are too many, the key with the most
// connections loses its oldest, so a key's holder may connect any number of times without locking others out.
//
// libzmq identifies the key of a connection only with its first message. Connections without a message have separate
// room until they send one; the address with the most of them loses its oldest, as peers send as soon as they are
// admitted. The budget only decides; it owns no connections.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "net/connection_budget.h"

namespace penstock::net {

// Connections that have sent no message have 1 / kQuietPart of a server's room, and one address 1 / kAddressPart of
// that. One key has 1 / kKeyPart of the rest.
constexpr size_t kQuietPart = 4;
constexpr size_t kKeyPart = 2;
constexpr size_t kHoldersLeast = 16;

// The room of one server: `count_max` connections, but at most one for every `descriptors_for_each` of the process's
// descriptor limit. A worker's servers use an eighth and a sixteenth of the descriptors, in addition to five eighths
// for strangers (connection_budget.h), so three sixteenths remain.
struct HolderRoom {
  size_t count_max = 1024;
  uint64_t descriptors_for_each = 8;
};

// Thread-compatible.
class HolderBudget {
 public:
  struct Limits {
    size_t known_count_max;
    size_t key_count_max;
    size_t quiet_count_max;
    size_t quiet_address_count_max;
  };
  static Limits limits_under(uint64_t descriptor_limit, const HolderRoom& room);

  using Address = ConnectionBudget::Address;

  explicit HolderBudget(const Limits& limits) : limits_(limits) {}

  // A connection was admitted that has sent no message yet. `id` is unique among the connections here.
  void add(int id, const Address& address);
  // The connection has sent a message; `key` is the key that it had shown.
  void speak(int id, std::string_view key);
  // The connection has ended.
  void remove(int id);

  bool has(int id) const { return places_.contains(id); }
  size_t count() const { return places_.size(); }

  // The connection to close after `id` was added or has spoken. None if there is room for all.
  std::optional<int> surplus(int id) const;

 private:
  using Queue = std::map<uint64_t, int>;  // connections by the order in which they were added
  struct Part {
    std::map<std::string, Queue> queues{};  // by key, or by the bytes of the address; no queue is empty
    size_t count = 0;
  };
  struct Place {
    bool is_quiet;
    std::string group;
    uint64_t order;
  };

  Part& part_of(const Place& place) { return place.is_quiet ? quiet_ : known_; }
  void put(int id, Place place);
  // The oldest of the longest queue of a non-empty part; of equally long ones, the queue whose first connection is
  // oldest.
  static int first_of_longest(const Part& part);

  const Limits limits_;
  Part quiet_;
  Part known_;
  std::map<int, Place> places_;  // by id
  uint64_t added_count_ = 0;
};

}  // namespace penstock::net
