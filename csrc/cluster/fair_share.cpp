// SPDX-License-Identifier: Apache-2.0
#include "cluster/fair_share.h"

#include <optional>
#include <tuple>

namespace penstock::cluster {

std::vector<uint32_t> fair_shares(std::span<const Demand> demands, uint32_t worker_count) {
  std::vector<uint32_t> shares(demands.size(), 0);
  const auto rank = [&](size_t index) {
    return std::tuple(shares[index], -static_cast<int64_t>(demands[index].worker_count), demands[index].trainer_id);
  };
  for (uint32_t given = 0; given < worker_count; ++given) {
    std::optional<size_t> next;
    for (size_t index = 0; index < demands.size(); ++index) {
      if (shares[index] >= demands[index].worker_count_max) continue;
      if (!next || rank(index) < rank(*next)) next = index;
    }
    if (!next) break;
    ++shares[*next];
  }
  return shares;
}

}  // namespace penstock::cluster
