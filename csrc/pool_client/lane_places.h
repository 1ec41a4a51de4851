// SPDX-License-Identifier: Apache-2.0
#pragma once
// The progress of each shard of an iterable dataset, in answers: the position from which another worker can continue.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "session/dispatch.h"

namespace penstock::pool_client {

// Thread-compatible.
class LanePlaces {
 public:
  struct Place {
    uint64_t batch_count = 0;           // answered, including errors
    std::vector<std::byte> state = {};  // of the dataset after these batches; empty if it has none
  };

  // Forgets all places; lanes that are not in `places` start from the first batch.
  void begin(std::map<wire::Lane, Place> places) { places_ = std::move(places); }

  void answered(wire::Lane lane, std::span<const std::byte> state) {
    Place& place = places_[lane];
    ++place.batch_count;
    place.state.assign(state.begin(), state.end());
  }

  // The request's part for a lane start (PROTOCOL.md): the number of batches, and the state. Empty at the start of the
  // lane.
  std::vector<std::byte> start_of(wire::Lane lane) const {
    const auto found = places_.find(lane);
    if (found == places_.end()) return {};
    const Place& place = found->second;
    std::vector<std::byte> bytes(sizeof place.batch_count);
    std::memcpy(bytes.data(), &place.batch_count, sizeof place.batch_count);
    bytes.insert(bytes.end(), place.state.begin(), place.state.end());
    return bytes;
  }

 private:
  std::map<wire::Lane, Place> places_;
};

}  // namespace penstock::pool_client
