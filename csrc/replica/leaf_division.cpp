// SPDX-License-Identifier: Apache-2.0
#include "replica/leaf_division.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "wire/nest.h"

namespace penstock::replica {
namespace {

constexpr size_t kShownNamesMax = 32;  // in a message

bool is_within(std::string_view leaf, std::string_view name) {
  return leaf.starts_with(name) && (leaf.size() == name.size() || leaf[name.size()] == '.');
}

std::string shown_names(const std::vector<wire::NamedLeaf>& leaves) {
  std::string text;
  for (size_t place = 0; place < leaves.size() && place < kShownNamesMax; ++place)
    text += (place > 0 ? ", '" : "'") + leaves[place].name + "'";
  if (leaves.size() > kShownNamesMax) text += " and " + std::to_string(leaves.size() - kShownNamesMax) + " others";
  return text.empty() ? "none" : text;
}

// The leaves that are not read, according to `is_read(entry)`.
template <typename IsRead>
std::vector<uint32_t> absent_leaves(const std::vector<wire::NamedLeaf>& leaves, std::span<const LeafReaders> readers,
                                    const IsRead& is_read) {
  std::set<uint32_t> absent;
  std::set<uint32_t> read;
  for (const wire::NamedLeaf& leaf : leaves) {
    const bool is_absent = std::ranges::any_of(
        readers, [&](const auto& entry) { return is_within(leaf.name, entry.name) && !is_read(entry); });
    (is_absent ? absent : read).insert(leaf.index);
  }
  std::erase_if(absent, [&](uint32_t index) { return read.contains(index); });
  return {absent.begin(), absent.end()};
}

}  // namespace

Result<LeafDivision> divide_leaves(std::span<const std::byte> nest, std::span<const LeafReaders> readers,
                                   size_t follower_count) {
  const auto leaves = wire::named_leaves(nest);
  if (!leaves)
    return Fault{Errc::kUnsupported,
                 "leaves needs batches of dicts, lists, tuples, dataclasses and registered classes, got one that is "
                 "sent as a pickle, whose leaves have no names; return such a batch from collate_fn, or leave leaves "
                 "out"};
  for (const LeafReaders& entry : readers) {
    bool is_found = false;
    for (const wire::NamedLeaf& leaf : *leaves) {
      if (!is_within(leaf.name, entry.name)) continue;
      is_found = true;
      if (!leaf.is_fixed) continue;
      return Fault{Errc::kUnsupported, "leaves must name tensors that can have a placeholder, got '" + entry.name +
                                           "': '" + leaf.name +
                                           "' is a numpy array, or a tensor from which an object of a registered class "
                                           "is made; return a tensor in a dict, list, tuple or dataclass"};
    }
    if (is_found) continue;
    return Fault{Errc::kUnsupported, "leaves must name tensors of the batch, got '" + entry.name +
                                         "', and the batch has the tensors " + shown_names(*leaves) +
                                         "; name one of them, or the container of some"};
  }
  LeafDivision division{
      .absent_here = absent_leaves(*leaves, readers, [](const LeafReaders& entry) { return entry.is_read_here; }),
      .absent = {}};
  for (size_t follower = 0; follower < follower_count; ++follower) {
    const auto is_read = [&](const LeafReaders& entry) { return entry.followers[follower]; };
    division.absent.push_back(absent_leaves(*leaves, readers, is_read));
  }
  return division;
}

}  // namespace penstock::replica
