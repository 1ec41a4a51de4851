// SPDX-License-Identifier: Apache-2.0
#include "visits/merkle_tree.h"

#include <gtest/gtest.h>

#include <bit>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::visits {
namespace {

Hash leaf_of(std::string_view text) { return leaf_hash(std::as_bytes(std::span(text.data(), text.size()))); }

// Leaves that are their own numbers, in decimal digits.
Hash numbered(uint64_t index) { return leaf_of(std::to_string(index)); }

MerkleTree numbered_tree(uint64_t size) {
  MerkleTree tree;
  for (uint64_t index = 0; index < size; ++index) tree.append(numbered(index));
  return tree;
}

// The definitions of RFC 6962, section 2.1, by recursion over all leaves.
uint64_t split_of(uint64_t count) {
  uint64_t split = 1;
  while (2 * split < count) split *= 2;
  return split;
}

Hash naive_root(uint64_t first, uint64_t last) {
  if (last - first == 1) return numbered(first);
  const uint64_t split = first + split_of(last - first);
  return node_hash(naive_root(first, split), naive_root(split, last));
}

std::vector<Hash> naive_path(uint64_t index, uint64_t first, uint64_t last) {
  if (last - first == 1) return {};
  const uint64_t split = first + split_of(last - first);
  auto path = index < split ? naive_path(index, first, split) : naive_path(index, split, last);
  path.push_back(index < split ? naive_root(split, last) : naive_root(first, split));
  return path;
}

std::vector<Hash> naive_consistency(uint64_t old_size, uint64_t first, uint64_t last, bool is_whole) {
  if (old_size == last) return is_whole ? std::vector<Hash>() : std::vector<Hash>{naive_root(first, last)};
  const uint64_t split = first + split_of(last - first);
  auto proof = old_size <= split ? naive_consistency(old_size, first, split, is_whole)
                                 : naive_consistency(old_size, split, last, false);
  proof.push_back(old_size <= split ? naive_root(split, last) : naive_root(first, split));
  return proof;
}

std::string hex_of_all(const std::vector<Hash>& hashes) {
  std::string text;
  for (const Hash& hash : hashes) text += hex_of(hash) + "\n";
  return text;
}

// The inputs that the tests of Certificate Transparency use; the roots were computed by Python's hashlib.
TEST(MerkleTree, RootsAreThoseOfPythonsHashlib) {
  const std::vector<std::string> leaves = {std::string(),
                                           std::string("\x00", 1),
                                           "\x10",
                                           "\x20\x21",
                                           "\x30\x31",
                                           "\x40\x41\x42\x43",
                                           "\x50\x51\x52\x53\x54\x55\x56\x57",
                                           "\x60\x61\x62\x63\x64\x65\x66\x67\x68\x69\x6a\x6b\x6c\x6d\x6e\x6f"};
  const std::vector<std::string> roots = {"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
                                          "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
                                          "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
                                          "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
                                          "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
                                          "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
                                          "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
                                          "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
                                          "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"};
  MerkleTree tree;
  for (size_t size = 0; size < roots.size(); ++size) {
    EXPECT_EQ(hex_of(tree.root()), roots[size]) << size;
    if (size < leaves.size()) tree.append(leaf_of(leaves[size]));
  }
}

TEST(MerkleTree, RootOfAThousandLeavesIsThatOfPythonsHashlib) {
  const MerkleTree tree = numbered_tree(1000);
  EXPECT_EQ(hex_of(tree.root()), "638afa98022925bacfddadb15ef22fd0199c1ac99c2973b6158243d13fce05c2");
  EXPECT_EQ(hex_of(tree.root(777, numbered)), "018a319d5e2bb933683eb1305e900102ef4a63640a8de503d7958e048625df05");
}

TEST(MerkleTree, ProofsAreThoseOfTheRecursiveDefinition) {
  const MerkleTree tree = numbered_tree(130);
  for (const uint64_t size : {1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 129, 130}) {
    EXPECT_EQ(tree.root(size, numbered), naive_root(0, size)) << size;
    for (uint64_t index = 0; index < size; ++index) {
      EXPECT_EQ(hex_of_all(tree.inclusion(index, size, numbered)), hex_of_all(naive_path(index, 0, size)))
          << index << " of " << size;
    }
    for (uint64_t old_size = 1; old_size <= size; ++old_size) {
      EXPECT_EQ(hex_of_all(tree.consistency(old_size, size, numbered)),
                hex_of_all(naive_consistency(old_size, 0, size, true)))
          << old_size << " of " << size;
    }
  }
}

TEST(MerkleTree, ProofsAreAcceptedAndChangedOnesAreNot) {
  const MerkleTree tree = numbered_tree(77);
  for (uint64_t size = 1; size <= 77; ++size) {
    const Hash root = tree.root(size, numbered);
    for (uint64_t index = 0; index < size; ++index) {
      auto path = tree.inclusion(index, size, numbered);
      EXPECT_TRUE(proves_inclusion(numbered(index), index, size, path, root));
      EXPECT_FALSE(proves_inclusion(numbered(index + 1), index, size, path, root));
      EXPECT_FALSE(proves_inclusion(numbered(index), (index + 1) % size, size, path, root) && size > 1);
      if (path.empty()) continue;
      path.back()[7] ^= 1;
      EXPECT_FALSE(proves_inclusion(numbered(index), index, size, path, root));
      path.pop_back();
      EXPECT_FALSE(proves_inclusion(numbered(index), index, size, path, root));
    }
    for (uint64_t old_size = 1; old_size <= size; ++old_size) {
      const Hash old_root = tree.root(old_size, numbered);
      auto proof = tree.consistency(old_size, size, numbered);
      EXPECT_TRUE(proves_consistency(old_size, old_root, size, root, proof)) << old_size << " of " << size;
      EXPECT_FALSE(proves_consistency(old_size, numbered(1000), size, root, proof));
      if (proof.empty()) continue;
      proof.front()[0] ^= 1;
      EXPECT_FALSE(proves_consistency(old_size, old_root, size, root, proof)) << old_size << " of " << size;
    }
  }
}

TEST(MerkleTree, OfItsPartsIsTheSame) {
  for (const uint64_t size : {0, 1, 15, 16, 33, 500}) {
    const MerkleTree tree = numbered_tree(size);
    const auto again = MerkleTree::of_parts(size, tree.levels(), tree.tail());
    ASSERT_TRUE(again);
    EXPECT_EQ(again->root(), tree.root());
    EXPECT_FALSE(MerkleTree::of_parts(size + 1, tree.levels(), tree.tail()));
  }
}

TEST(MerkleTree, FirstDifferenceIsFoundInLogarithmicallyManyLeaves) {
  const uint64_t size = 1000;
  const MerkleTree tree = numbered_tree(size);
  for (const uint64_t differing : {0, 1, 15, 16, 511, 512, 700, 991, 999}) {
    const auto changed = [&](uint64_t index) { return numbered(index < differing ? index : index + 5000); };
    MerkleTree other;
    for (uint64_t index = 0; index < size; ++index) other.append(changed(index));
    uint64_t read_count = 0;
    const auto counted = [&](uint64_t index) {
      ++read_count;
      return numbered(index);
    };
    EXPECT_EQ(first_difference(tree, counted, other, changed), differing);
    EXPECT_LE(read_count, 64u);
  }
  EXPECT_EQ(first_difference(tree, numbered, tree, numbered), std::nullopt);
  EXPECT_EQ(first_difference(tree, numbered, numbered_tree(900), numbered), std::nullopt);
}

}  // namespace
}  // namespace penstock::visits
