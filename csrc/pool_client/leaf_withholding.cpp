// SPDX-License-Identifier: Apache-2.0
#include "pool_client/leaf_withholding.h"

#include <algorithm>

namespace penstock::pool_client {

void LeafWithholding::take(uint64_t model, uint64_t verify_every) { verify_every_[model] = verify_every; }

std::optional<LeafWithholding::Order> LeafWithholding::forget(uint64_t model) {
  verify_every_.erase(model);
  return send_whole();
}

std::optional<LeafWithholding::Order> LeafWithholding::note_call(uint64_t model, const std::optional<SeenBatch>& batch,
                                                                 std::vector<UsedCut> cuts) {
  ++call_count_;
  if (!batch || is_withholding_) return std::nullopt;
  read_.insert(batch->read_leaves.begin(), batch->read_leaves.end());
  const bool are_settled = std::all_of(cuts.begin(), cuts.end(), [](const UsedCut& cut) { return cut.is_settled; });
  cuts_[model] = std::move(cuts);
  if (auto wanted = unread(*batch); wanted != watched_leaves_) {
    watched_leaves_ = std::move(wanted);
    watched_calls_ = 0;
  } else if (!watched_leaves_.empty() && batch->is_watched && are_settled) {
    if (++watched_calls_ >= kWatchedCalls) return withhold();
  }
  return std::nullopt;
}

std::optional<LeafWithholding::Order> LeafWithholding::send_whole() {
  watched_leaves_.clear();
  watched_calls_ = 0;
  cuts_.clear();
  if (!std::exchange(is_withholding_, false)) return std::nullopt;
  return Order{};
}

std::optional<LeafWithholding::Order> LeafWithholding::note_recall(uint32_t leaf) {
  while (!recalls_.empty() && call_count_ - recalls_.front().first > kRecallsWindow) recalls_.pop_front();
  recalls_.emplace_back(call_count_, leaf);
  const auto count =
      std::count_if(recalls_.begin(), recalls_.end(), [&](const auto& recall) { return recall.second == leaf; });
  if (count <= kRecallsMax || !read_.insert(leaf).second) return std::nullopt;
  return send_whole();
}

// The leaves that, according to the calls so far, neither the models' suffixes nor the program reads.
std::set<uint32_t> LeafWithholding::unread(const SeenBatch& batch) const {
  std::set<uint32_t> needed = read_;
  bool has_cut = false;
  for (const auto& [model, cuts] : cuts_) {
    for (const UsedCut& cut : cuts) {
      if (cut.keys.empty()) return {};
      has_cut = true;
      needed.insert(cut.raw_leaves.begin(), cut.raw_leaves.end());
    }
  }
  std::set<uint32_t> found;
  for (uint32_t leaf = 0; has_cut && leaf < batch.leaf_bytes.size(); ++leaf)
    if (batch.leaf_bytes[leaf] >= kLeafBytesMin && !needed.contains(leaf)) found.insert(leaf);
  return found;
}

LeafWithholding::Order LeafWithholding::withhold() {
  // The boundary tensors of all graphs together replace the leaves.
  std::set<std::string> keys;
  for (const auto& [model, cuts] : cuts_)
    for (const UsedCut& cut : cuts) keys.insert(cut.keys.begin(), cut.keys.end());
  uint64_t whole_every = 0;
  for (const auto& [model, every] : verify_every_)
    whole_every = whole_every == 0 ? every : std::min(whole_every, every);
  is_withholding_ = true;
  return {.shipment = wire::Shipment{.boundary_keys = {{keys.begin(), keys.end()}},
                                     .withheld = {watched_leaves_.begin(), watched_leaves_.end()},
                                     .whole_every = std::max<uint64_t>(1, whole_every)}};
}

}  // namespace penstock::pool_client
