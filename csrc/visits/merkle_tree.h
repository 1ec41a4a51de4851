// SPDX-License-Identifier: Apache-2.0
#pragma once
// The Merkle tree of RFC 6962 (Certificate Transparency) over SHA-256, with its root, inclusion and consistency proofs,
// and the first leaf in which two trees differ. Any verifier of that RFC checks these proofs.
//
// Only the hashes of complete subtrees of kBlockLeaves leaves and more are kept, four bytes per leaf. The hash of a
// single leaf is computed again from its record when a proof needs it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace penstock::visits {

using Hash = std::array<uint8_t, 32>;

// The hash of a leaf: SHA-256(0x00 || bytes). Throws AssertionFailure if OpenSSL has no SHA-256.
Hash leaf_hash(std::span<const std::byte> bytes);
// The hash of an inner node: SHA-256(0x01 || left || right).
Hash node_hash(const Hash& left, const Hash& right);

// The digits of a hash, in lower case.
std::string hex_of(const Hash& hash);

// Thread-compatible.
class MerkleTree {
 public:
  static constexpr uint32_t kBlockLevel = 4;
  static constexpr uint64_t kBlockLeaves = 1 << kBlockLevel;

  // Returns the hash of leaf `index` of this tree, which has been appended.
  using LeafReader = std::function<Hash(uint64_t index)>;

  void append(const Hash& leaf);

  uint64_t size() const { return size_; }
  Hash root() const;
  // The root of the first `size` leaves, at most size().
  Hash root(uint64_t size, const LeafReader& leaf) const;

  // The hash of the leaves from `first` to before `last`, as it is in the tree of the first `last` leaves; `first` is
  // where a subtree starts.
  Hash range(uint64_t first, uint64_t last, const LeafReader& leaf) const;

  // The audit path of leaf `index` in the tree of the first `size` leaves (RFC 6962, section 2.1.1). `index` < `size`.
  std::vector<Hash> inclusion(uint64_t index, uint64_t size, const LeafReader& leaf) const;
  // The proof that the tree of the first `size` leaves starts with the first `old_size` (section 2.1.2).
  // 0 < `old_size` <= `size`.
  std::vector<Hash> consistency(uint64_t old_size, uint64_t size, const LeafReader& leaf) const;

  // The hashes of complete subtrees by level: entry i of level L covers the leaves from i << (kBlockLevel + L) on.
  const std::vector<std::vector<Hash>>& levels() const { return levels_; }
  // The hashes of the last leaves, which fill no block.
  const std::vector<Hash>& tail() const { return tail_; }
  // Returns the tree with these hashes; none if their numbers do not fit `size`.
  static std::optional<MerkleTree> of_parts(uint64_t size, std::vector<std::vector<Hash>> levels,
                                            std::vector<Hash> tail);

 private:
  uint64_t size_ = 0;
  std::vector<std::vector<Hash>> levels_;
  std::vector<Hash> tail_;
};

// Whether `path` proves that a leaf is number `index` of the tree of `size` leaves with this root.
bool proves_inclusion(const Hash& leaf, uint64_t index, uint64_t size, std::span<const Hash> path, const Hash& root);
// Whether `proof` proves that the tree of `size` leaves starts with the tree of `old_size` leaves.
bool proves_consistency(uint64_t old_size, const Hash& old_root, uint64_t size, const Hash& root,
                        std::span<const Hash> proof);

// The first leaf that differs, by comparing subtrees from the largest down: O(log n) comparisons. None if one tree is
// the start of the other.
std::optional<uint64_t> first_difference(const MerkleTree& a, const MerkleTree::LeafReader& leaf_of_a,
                                         const MerkleTree& b, const MerkleTree::LeafReader& leaf_of_b);

}  // namespace penstock::visits
