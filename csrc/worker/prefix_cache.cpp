// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_cache.h"

#include <algorithm>
#include <utility>

namespace penstock::worker {

void PrefixCache::put(const wire::BlobId& id, std::span<const std::byte> message) {
  Entry& entry = entries_[id];
  entry = {};
  if (!wire::is_shipment(message)) {
    entry.prefix = load_prefix(message);
  } else if (auto shipment = wire::parse_shipment(message)) {
    entry.shipment = std::move(shipment).value();
  }
}

void PrefixCache::select(std::span<const wire::BlobId> ids, PrefixStage& stage) {
  if (!std::equal(ids.begin(), ids.end(), selected_.begin(), selected_.end())) {
    selected_before_ = std::exchange(selected_, {ids.begin(), ids.end()});
    std::erase_if(entries_, [&](const auto& item) {
      const auto is_it = [&](const wire::BlobId& id) { return id == item.first; };
      return std::none_of(selected_.begin(), selected_.end(), is_it) &&
             std::none_of(selected_before_.begin(), selected_before_.end(), is_it);
    });
  }
  stage.clear();
  shipment_ = nullptr;
  for (const wire::BlobId& id : ids) {
    const auto found = entries_.find(id);
    if (found == entries_.end()) continue;
    if (found->second.prefix) stage.install(found->second.prefix);
    if (found->second.shipment) shipment_ = &*found->second.shipment;
  }
}

}  // namespace penstock::worker
