// SPDX-License-Identifier: Apache-2.0
#include "net/holder_budget.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace penstock::net {

HolderBudget::Limits HolderBudget::limits_under(uint64_t descriptor_limit, const HolderRoom& room) {
  PENSTOCK_ASSERT(room.count_max >= kHoldersLeast && room.descriptors_for_each > 0);
  const auto count = static_cast<size_t>(
      std::clamp<uint64_t>(descriptor_limit / room.descriptors_for_each, kHoldersLeast, room.count_max));
  const size_t quiet_count = count / kQuietPart;
  return {.known_count_max = count - quiet_count,
          .key_count_max = (count - quiet_count) / kKeyPart,
          .quiet_count_max = quiet_count,
          .quiet_address_count_max = quiet_count / kAddressPart};
}

void HolderBudget::add(int id, const Address& address) {
  PENSTOCK_ASSERT(!has(id), "connection ", id, " already exists");
  put(id, {.is_quiet = true, .group = std::string(address.begin(), address.end()), .order = ++added_count_});
}

void HolderBudget::speak(int id, std::string_view key) {
  Place place = places_.at(id);
  place.is_quiet = false;
  place.group = key;
  remove(id);
  put(id, std::move(place));
}

void HolderBudget::put(int id, Place place) {
  Part& part = part_of(place);
  part.queues[place.group].emplace(place.order, id);
  ++part.count;
  places_.emplace(id, std::move(place));
}

void HolderBudget::remove(int id) {
  const auto place = places_.find(id);
  PENSTOCK_ASSERT(place != places_.end(), "unknown connection ", id);
  Part& part = part_of(place->second);
  const auto queue = part.queues.find(place->second.group);
  queue->second.erase(place->second.order);
  if (queue->second.empty()) part.queues.erase(queue);
  --part.count;
  places_.erase(place);
}

int HolderBudget::first_of_longest(const Part& part) {
  const auto goes_first = [](const auto& a, const auto& b) {
    if (a.second.size() != b.second.size()) return a.second.size() > b.second.size();
    return a.second.begin()->first < b.second.begin()->first;
  };
  return std::min_element(part.queues.begin(), part.queues.end(), goes_first)->second.begin()->second;
}

std::optional<int> HolderBudget::surplus(int id) const {
  if (const auto place = places_.find(id); place != places_.end()) {
    const bool is_quiet = place->second.is_quiet;
    const Queue& queue = (is_quiet ? quiet_ : known_).queues.at(place->second.group);
    if (queue.size() > (is_quiet ? limits_.quiet_address_count_max : limits_.key_count_max))
      return queue.begin()->second;
  }
  if (quiet_.count > limits_.quiet_count_max) return first_of_longest(quiet_);
  if (known_.count > limits_.known_count_max) return first_of_longest(known_);
  return std::nullopt;
}

}  // namespace penstock::net
