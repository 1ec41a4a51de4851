// SPDX-License-Identifier: Apache-2.0
#include "visits/merkle_tree.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/bytes.h"
#include "base/result.h"
#include "graph/sha256.h"

namespace penstock::visits {
namespace {

constexpr std::byte kLeafPrefix{0};
constexpr std::byte kNodePrefix{1};

// The largest power of two below `count`, which is at least 2.
uint64_t split_of(uint64_t count) { return std::bit_floor(count - 1); }

// One context for each thread: making one takes longer than a hash.
graph::Sha256& fresh_hash() {
  thread_local graph::Sha256 hash;
  hash.restart();
  return hash;
}

}  // namespace

Hash leaf_hash(std::span<const std::byte> bytes) {
  graph::Sha256& hash = fresh_hash();
  hash.update(std::span(&kLeafPrefix, 1));
  hash.update(bytes);
  return hash.finish();
}

Hash node_hash(const Hash& left, const Hash& right) {
  graph::Sha256& hash = fresh_hash();
  hash.update(std::span(&kNodePrefix, 1));
  hash.update(std::as_bytes(std::span(left)));
  hash.update(std::as_bytes(std::span(right)));
  return hash.finish();
}

std::string hex_of(const Hash& hash) {
  std::string text;
  for (const uint8_t byte : hash) append_hex(text, byte);
  return text;
}

void MerkleTree::append(const Hash& leaf) {
  ++size_;
  tail_.push_back(leaf);
  if (tail_.size() < kBlockLeaves) return;
  std::vector<Hash> nodes = std::exchange(tail_, {});
  while (nodes.size() > 1) {
    for (size_t place = 0; place < nodes.size() / 2; ++place)
      nodes[place] = node_hash(nodes[2 * place], nodes[2 * place + 1]);
    nodes.resize(nodes.size() / 2);
  }
  Hash node = nodes.front();
  for (size_t level = 0;; ++level) {
    if (level == levels_.size()) levels_.emplace_back();
    levels_[level].push_back(node);
    if (levels_[level].size() % 2 != 0) return;
    node = node_hash(levels_[level][levels_[level].size() - 2], node);
  }
}

Hash MerkleTree::root() const {
  const uint64_t first_of_tail = size_ - tail_.size();
  return root(size_, [&](uint64_t index) { return tail_.at(index - first_of_tail); });
}

Hash MerkleTree::root(uint64_t size, const LeafReader& leaf) const {
  PENSTOCK_ASSERT(size <= size_, size, " leaves of ", size_);
  if (size == 0) return fresh_hash().finish();
  return range(0, size, leaf);
}

Hash MerkleTree::range(uint64_t first, uint64_t last, const LeafReader& leaf) const {
  const uint64_t count = last - first;
  if (count == 1) return leaf(first);
  if (std::has_single_bit(count) && count >= kBlockLeaves && first % count == 0) {
    const auto level = static_cast<size_t>(std::countr_zero(count)) - kBlockLevel;
    if (level < levels_.size() && first / count < levels_[level].size()) return levels_[level][first / count];
  }
  const uint64_t split = first + split_of(count);
  return node_hash(range(first, split, leaf), range(split, last, leaf));
}

std::vector<Hash> MerkleTree::inclusion(uint64_t index, uint64_t size, const LeafReader& leaf) const {
  PENSTOCK_ASSERT(index < size && size <= size_, index, " of ", size, " of ", size_);
  std::vector<Hash> path;
  uint64_t first = 0;
  uint64_t last = size;
  while (last - first > 1) {
    const uint64_t split = first + split_of(last - first);
    if (index < split) {
      path.push_back(range(split, last, leaf));
      last = split;
    } else {
      path.push_back(range(first, split, leaf));
      first = split;
    }
  }
  std::ranges::reverse(path);
  return path;
}

std::vector<Hash> MerkleTree::consistency(uint64_t old_size, uint64_t size, const LeafReader& leaf) const {
  PENSTOCK_ASSERT(0 < old_size && old_size <= size && size <= size_, old_size, " of ", size, " of ", size_);
  std::vector<Hash> proof;
  uint64_t first = 0;
  uint64_t last = size;
  bool is_whole = true;  // whether the old tree is a subtree of the new one so far
  while (old_size != last) {
    const uint64_t split = first + split_of(last - first);
    if (old_size <= split) {
      proof.push_back(range(split, last, leaf));
      last = split;
    } else {
      proof.push_back(range(first, split, leaf));
      first = split;
      is_whole = false;
    }
  }
  if (!is_whole) proof.push_back(range(first, last, leaf));
  std::ranges::reverse(proof);
  return proof;
}

std::optional<MerkleTree> MerkleTree::of_parts(uint64_t size, std::vector<std::vector<Hash>> levels,
                                               std::vector<Hash> tail) {
  if (tail.size() != size % kBlockLeaves) return std::nullopt;
  uint64_t count = size / kBlockLeaves;
  for (const auto& level : levels) {
    if (count == 0 || level.size() != count) return std::nullopt;
    count /= 2;
  }
  if (count != 0) return std::nullopt;
  MerkleTree tree;
  tree.size_ = size;
  tree.levels_ = std::move(levels);
  tree.tail_ = std::move(tail);
  return tree;
}

namespace {

// Walks from the leaf at `place` to the root over leaves 0 to `last`. `join` gets each hash of the path, and whether it
// is the left one of its pair. Returns whether the path ends at the root.
template <typename Join>
bool climb(uint64_t place, uint64_t last, std::span<const Hash> path, const Join& join) {
  for (const Hash& other : path) {
    if (last == 0) return false;
    const bool is_left = place % 2 != 0 || place == last;
    join(other, is_left);
    while (is_left && place % 2 == 0 && place != 0) {
      place /= 2;
      last /= 2;
    }
    place /= 2;
    last /= 2;
  }
  return last == 0;
}

}  // namespace

bool proves_inclusion(const Hash& leaf, uint64_t index, uint64_t size, std::span<const Hash> path, const Hash& root) {
  if (index >= size) return false;
  Hash hash = leaf;
  const bool is_at_root = climb(index, size - 1, path, [&](const Hash& other, bool is_left) {
    hash = is_left ? node_hash(other, hash) : node_hash(hash, other);
  });
  return is_at_root && hash == root;
}

bool proves_consistency(uint64_t old_size, const Hash& old_root, uint64_t size, const Hash& root,
                        std::span<const Hash> proof) {
  if (old_size == 0 || old_size > size) return false;
  if (old_size == size) return proof.empty() && old_root == root;
  std::vector<Hash> path(proof.begin(), proof.end());
  if (std::has_single_bit(old_size)) path.insert(path.begin(), old_root);
  if (path.empty()) return false;
  uint64_t place = old_size - 1;
  uint64_t last = size - 1;
  while (place % 2 != 0) {
    place /= 2;
    last /= 2;
  }
  Hash old_hash = path.front();
  Hash hash = path.front();
  const bool is_at_root = climb(place, last, std::span(path).subspan(1), [&](const Hash& other, bool is_left) {
    if (is_left) old_hash = node_hash(other, old_hash);
    hash = is_left ? node_hash(other, hash) : node_hash(hash, other);
  });
  return is_at_root && old_hash == old_root && hash == root;
}

std::optional<uint64_t> first_difference(const MerkleTree& a, const MerkleTree::LeafReader& leaf_of_a,
                                         const MerkleTree& b, const MerkleTree::LeafReader& leaf_of_b) {
  const uint64_t size = std::min(a.size(), b.size());
  if (size == 0 || a.root(size, leaf_of_a) == b.root(size, leaf_of_b)) return std::nullopt;
  uint64_t first = 0;
  uint64_t last = size;
  while (last - first > 1) {
    const uint64_t split = first + split_of(last - first);
    // Ranges of a power of two, aligned: their hashes are kept.
    const auto hash_of = [&](const MerkleTree& tree, const MerkleTree::LeafReader& leaf) {
      return tree.range(first, split, leaf);
    };
    if (hash_of(a, leaf_of_a) == hash_of(b, leaf_of_b))
      first = split;
    else
      last = split;
  }
  return first;
}

}  // namespace penstock::visits
