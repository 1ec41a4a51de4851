// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_cache.h"

#include <algorithm>
#include <utility>

namespace penstock::worker {

void PrefixCache::select(std::span<const wire::BlobId> ids, PrefixStage& stage) {
  if (!std::equal(ids.begin(), ids.end(), selected_.begin(), selected_.end())) {
    selected_before_ = std::exchange(selected_, {ids.begin(), ids.end()});
    std::erase_if(prefixes_, [&](const auto& item) {
      const auto is_it = [&](const wire::BlobId& id) { return id == item.first; };
      return std::none_of(selected_.begin(), selected_.end(), is_it) &&
             std::none_of(selected_before_.begin(), selected_before_.end(), is_it);
    });
  }
  stage.clear();
  for (const wire::BlobId& id : ids) {
    const auto found = prefixes_.find(id);
    if (found != prefixes_.end() && found->second) stage.install(found->second);
  }
}

}  // namespace penstock::worker
