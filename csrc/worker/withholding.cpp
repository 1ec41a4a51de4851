// SPDX-License-Identifier: Apache-2.0
#include "worker/withholding.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "wire/nest.h"

namespace penstock::worker {
namespace {

bool has_all(const std::vector<std::string>& keys, const std::vector<std::string>& wanted) {
  return std::all_of(wanted.begin(), wanted.end(),
                     [&](const std::string& key) { return std::find(keys.begin(), keys.end(), key) != keys.end(); });
}

// The leaves that are tensors at every occurrence. Empty for a nest that cannot be read token by token.
std::optional<std::set<uint32_t>> plain_leaves(std::span<const std::byte> nest) {
  std::set<uint32_t> tensors, arrays;
  wire::NestReader reader(nest);
  while (!reader.at_end()) {
    const auto token = reader.next();
    if (!token || token.value().tag == wire::NestTag::kPickle) return std::nullopt;
    if (token.value().tag == wire::NestTag::kTensor) tensors.insert(token.value().count);
    if (token.value().tag == wire::NestTag::kArray) arrays.insert(token.value().count);
  }
  for (const uint32_t array : arrays) tensors.erase(array);
  return tensors;
}

}  // namespace

std::vector<uint32_t> leaves_to_withhold(const wire::Shipment& shipment, const BatchContent& content, uint64_t number) {
  if (shipment.whole_every > 0 && number % shipment.whole_every == 0) return {};
  const bool is_complete =
      std::any_of(shipment.boundary_keys.begin(), shipment.boundary_keys.end(),
                  [&](const std::vector<std::string>& keys) { return has_all(content.boundary_keys, keys); });
  if (!is_complete) return {};
  const auto plain = plain_leaves(content.nest);
  if (!plain) return {};
  const size_t leaf_count = content.tensors.size() - content.boundary_keys.size();
  std::set<uint32_t> withheld;
  for (const uint32_t leaf : shipment.withheld) {
    if (leaf >= leaf_count || !plain->contains(leaf)) continue;
    const auto* storage = content.tensors[leaf].storage().unsafeGetStorageImpl();
    const auto shares = [&](const at::Tensor& other) { return other.storage().unsafeGetStorageImpl() == storage; };
    const auto leaves_end = content.tensors.begin() + static_cast<ptrdiff_t>(leaf_count);
    if (std::count_if(content.tensors.begin(), leaves_end, shares) == 1) withheld.insert(leaf);
  }
  return {withheld.begin(), withheld.end()};
}

}  // namespace penstock::worker
