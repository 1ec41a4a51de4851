// SPDX-License-Identifier: Apache-2.0
#include "graph/needed_calls.h"

#include "base/assert.h"

namespace penstock::graph {

NeededCalls::NeededCalls(std::vector<CapturedCall> calls, std::set<uint32_t> forbidden_units)
    : calls_(std::move(calls)), forbidden_(std::move(forbidden_units)) {
  for (uint32_t place = 0; place < calls_.size(); ++place) {
    const CapturedCall& call = calls_[place];
    if (members_.size() <= call.unit) members_.resize(call.unit + 1);
    if (!call.is_droppable) members_[call.unit].push_back(place);
  }
}

std::optional<CallFault> NeededCalls::need(uint32_t call) {
  std::vector<std::pair<uint32_t, std::optional<uint32_t>>> pending{{call, std::nullopt}};
  while (!pending.empty()) {
    const auto [place, reader] = pending.back();
    pending.pop_back();
    PENSTOCK_ASSERT(place < calls_.size());
    if (needed_.contains(place)) continue;
    const CapturedCall& item = calls_[place];
    if (!item.is_droppable && forbidden_.contains(item.unit))
      return CallFault{.kind = CallFault::Kind::kForbidden, .call = place, .reader = reader};
    if (item.reads_intermediate)
      return CallFault{.kind = CallFault::Kind::kReadsIntermediate, .call = place, .reader = reader};
    needed_.insert(place);
    for (const uint32_t member : members_[item.unit]) pending.emplace_back(member, reader);
    for (const uint32_t read : item.reads) pending.emplace_back(read, place);
  }
  return std::nullopt;
}

void NeededCalls::need_region(uint32_t first, uint32_t last) {
  const auto inside = needed_.lower_bound(first);
  if (inside != needed_.end() && *inside < last) needed_.insert({first, last});
}

}  // namespace penstock::graph
