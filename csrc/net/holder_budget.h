// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which connections a server closes to make room among those that were let in. When there are too many, the key with
// the most of them loses its oldest, so that whoever has a key may connect as often as he likes and keeps nobody out.
//
// libzmq tells whose a connection is with its first message alone. Those that have sent none have a room of their own
// until they do, of which the fullest address loses its oldest: peers speak as soon as they are let in. It decides, and
// owns no connection.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "net/connection_budget.h"

namespace penstock::net {

// Those that have sent nothing have this part of a server's room, of which an address has kAddressPart. A key has that
// part of the rest.
constexpr size_t kQuietPart = 4;
constexpr size_t kKeyPart = 2;
constexpr size_t kHoldersLeast = 16;

// The room of one server: so many connections, but no more than one for each so many descriptors that the process may
// have open. A worker's are an eighth and a sixteenth of these, beside five eighths for strangers
// (connection_budget.h), so that three sixteenths are left.
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

  // A connection was let in that has sent nothing yet. `id` is a number that no other one here has.
  void add(int id, const Address& address);
  // It has sent a message: `key` is that which it had shown.
  void speak(int id, std::string_view key);
  // It has ended.
  void remove(int id);

  bool has(int id) const { return places_.contains(id); }
  size_t count() const { return places_.size(); }

  // The connection that is to go after `id` was added or has spoken. Nothing if there is room for all.
  std::optional<int> surplus(int id) const;

 private:
  using Queue = std::map<uint64_t, int>;  // connections by the order in which they were added
  struct Part {
    std::map<std::string, Queue> queues{};  // by key, or by the bytes of the address; none is empty
    size_t count = 0;
  };
  struct Place {
    bool is_quiet;
    std::string group;
    uint64_t order;
  };

  Part& part_of(const Place& place) { return place.is_quiet ? quiet_ : known_; }
  void put(int id, Place place);
  // Of the longest queue of a part that is not empty; of equal ones that of the connection which came first.
  static int first_of_longest(const Part& part);

  const Limits limits_;
  Part quiet_;
  Part known_;
  std::map<int, Place> places_;  // by id
  uint64_t added_count_ = 0;
};

}  // namespace penstock::net
