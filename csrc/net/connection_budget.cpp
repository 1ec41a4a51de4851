// SPDX-License-Identifier: Apache-2.0
#include "net/connection_budget.h"

#include <algorithm>

#include "base/assert.h"

namespace penstock::net {

ConnectionBudget::Limits ConnectionBudget::limits_under(uint64_t descriptor_limit, size_t sharer_count) {
  const auto count = static_cast<size_t>(std::clamp<uint64_t>(descriptor_limit / kDescriptorsForEach / sharer_count,
                                                              kStageConnectionsLeast, kStageConnectionsMax));
  return {.stage_count_max = count, .address_count_max = count / kAddressPart};
}

void ConnectionBudget::add(int id, const Address& address, Instant now) {
  PENSTOCK_ASSERT(!has(id), "connection ", id, " already exists");
  put(id, {.stage = HandshakeStage::kSilent, .address = address, .accepted_at = now});
}

void ConnectionBudget::put(int id, const Place& place) {
  Stage& its = at(place.stage);
  its.queues[place.address].push_back({.id = id, .accepted_at = place.accepted_at});
  ++its.count;
  places_.emplace(id, place);
}

void ConnectionBudget::advance(int id, HandshakeStage stage) {
  Place place = places_.at(id);
  PENSTOCK_ASSERT(stage > place.stage, "a handshake cannot return to an earlier stage");
  place.stage = stage;
  remove(id);
  put(id, place);
}

void ConnectionBudget::remove(int id) {
  const auto place = places_.find(id);
  PENSTOCK_ASSERT(place != places_.end(), "unknown connection ", id);
  Stage& its = at(place->second.stage);
  const auto queue = its.queues.find(place->second.address);
  std::erase_if(queue->second, [id](const Connection& connection) { return connection.id == id; });
  if (queue->second.empty()) its.queues.erase(queue);
  --its.count;
  places_.erase(place);
}

const ConnectionBudget::Queue& ConnectionBudget::longest_of(const Stage& stage) {
  const auto goes_first = [](const auto& a, const auto& b) {
    if (a.second.size() != b.second.size()) return a.second.size() > b.second.size();
    return a.second.front().accepted_at < b.second.front().accepted_at;
  };
  return std::min_element(stage.queues.begin(), stage.queues.end(), goes_first)->second;
}

std::optional<int> ConnectionBudget::surplus() const {
  for (const Stage& stage : stages_) {
    if (stage.count == 0) continue;
    const Queue& queue = longest_of(stage);
    if (stage.count > limits_.stage_count_max || queue.size() > limits_.address_count_max) return queue.front().id;
  }
  return std::nullopt;
}

std::optional<int> ConnectionBudget::first() const {
  for (const Stage& stage : stages_) {
    if (stage.count > 0) return longest_of(stage).front().id;
  }
  return std::nullopt;
}

std::vector<int> ConnectionBudget::overdue(Instant now) const {
  std::vector<int> ids;
  for (size_t index = 0; index < kHandshakeStageCount; ++index) {
    const Stage& stage = stages_[index];
    const bool is_pressed = stage.count * 4 > limits_.stage_count_max * 3;
    const Duration time = is_pressed ? kStageTimes[index] / 2 : kStageTimes[index];
    for (const auto& [address, queue] : stage.queues) {
      for (const Connection& connection : queue) {
        if (now - connection.accepted_at >= time) ids.push_back(connection.id);
      }
    }
  }
  return ids;
}

}  // namespace penstock::net
