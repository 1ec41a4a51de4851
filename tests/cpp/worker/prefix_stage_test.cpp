// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_stage.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "batch_fixture.h"
#include "runtime/seeded_draws.h"
#include "worker/prefix_message.h"

namespace penstock::worker {
namespace {

const std::string kOtherKey = "fedcba9876543210fedcba9876543210";

std::string adding(const std::string& draw, const std::string& key) {
  return "penstock-ir 1\ninput %x leaf 0 float32 [n]\n%r = " + draw +
         "\n%y = aten::add.Tensor(%x, %r)\noutput %y key \"" + key + "\"\n";
}

void install(PrefixStage& stage, const std::string& text, uint64_t seed) {
  const auto message =
      write_prefix_message({.text = text, .constants = {}, .seed = seed, .library = {}, .library_leaves = {}});
  ASSERT_TRUE(message);
  stage.install(message.value());
}

// The tensors that prefixes add to a batch of four ones.
std::vector<at::Tensor> run(PrefixStage& stage, uint64_t epoch_seed, uint64_t sequence) {
  BatchContent content{.tensors = {at::ones({4})}, .boundary_keys = {}, .nest = {}};
  stage.run(content, epoch_seed, sequence);
  EXPECT_EQ(content.boundary_keys.size() + 1, content.tensors.size());
  return {content.tensors.begin() + 1, content.tensors.end()};
}

TEST(PrefixStage, DrawsFollowFromThePlaceOfTheBatchAlone) {
  PrefixStage stage;
  install(stage, adding("aten::rand_like(%x)", kKey), 7);
  PrefixStage other;
  install(other, adding("aten::rand_like(%x)", kKey), 7);
  at::manual_seed(1);
  const auto first = run(stage, 11, 0);
  const auto second = run(stage, 11, 1);
  at::manual_seed(2);
  ASSERT_EQ(first.size(), 1);
  EXPECT_TRUE(is_same(run(other, 11, 1)[0], second[0]));
  EXPECT_TRUE(is_same(run(other, 11, 0)[0], first[0]));
  EXPECT_FALSE(is_same(first[0], second[0]));
  EXPECT_FALSE(is_same(first[0], run(stage, 12, 0)[0]));
}

TEST(PrefixStage, DrawsAreThoseOfTheSeededGenerator) {
  PrefixStage stage;
  install(stage, adding("aten::rand_like(%x)", kKey), 7);
  const auto made = run(stage, 11, 3);
  at::manual_seed(runtime::seed_of_batch(7, 11, 3));
  ASSERT_EQ(made.size(), 1);
  EXPECT_TRUE(is_same(made[0], at::add(at::ones({4}), at::rand({4}))));
}

TEST(PrefixStage, TheProcessGeneratorStaysAsItIs) {
  PrefixStage stage;
  install(stage, adding("aten::randn_like(%x)", kKey), 7);
  at::manual_seed(5);
  const at::Tensor expected = at::rand({8});
  at::manual_seed(5);
  run(stage, 11, 0);
  EXPECT_TRUE(is_same(at::rand({8}), expected));
}

TEST(PrefixStage, TwoPrefixesDrawDifferently) {
  PrefixStage stage;
  install(stage, adding("aten::rand_like(%x)", kKey), 7);
  install(stage, adding("aten::rand_like(%x)", kOtherKey), 8);
  const auto made = run(stage, 11, 0);
  ASSERT_EQ(made.size(), 2);
  EXPECT_FALSE(is_same(made[0], made[1]));
}

TEST(PrefixStage, ALibraryThatCannotBeLoadedIsNoLoss) {
  PrefixStage stage;
  const std::string text = adding("aten::neg(%x)", kKey);
  for (const char* library : {"", "no library"}) {
    const auto message =
        write_prefix_message({.text = text, .constants = {}, .seed = 0, .library = library, .library_leaves = {}});
    ASSERT_TRUE(message);
    stage.install(message.value());
    const auto made = run(stage, 0, 0);
    ASSERT_EQ(made.size(), 1);
    EXPECT_TRUE(is_same(made[0], at::zeros({4})));
  }
}

TEST(PrefixStage, AMessageIsReadAsItWasWrittenOrNotAtAll) {
  const uint64_t seed = 0xfedcba9876543210;
  const auto message = write_prefix_message(
      {.text = "text",
       .constants = {at::ones({3})},
       .seed = seed,
       .library = "library",
       .library_leaves = {{.leaf_index = 2, .dtype = at::kByte, .sizes = {3, 4}, .strides = {4, 1}}}});
  ASSERT_TRUE(message);
  const auto read = read_prefix_message(message.value());
  ASSERT_TRUE(read);
  EXPECT_EQ(read.value().text, "text");
  EXPECT_EQ(read.value().seed, seed);
  EXPECT_EQ(read.value().library, "library");
  ASSERT_EQ(read.value().library_leaves.size(), 1);
  const runtime::LeafLayout& leaf = read.value().library_leaves[0];
  EXPECT_EQ(leaf.leaf_index, 2u);
  EXPECT_EQ(leaf.dtype, at::kByte);
  EXPECT_EQ(leaf.sizes, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(leaf.strides, (std::vector<int64_t>{4, 1}));
  ASSERT_EQ(read.value().constants.size(), 1);
  EXPECT_TRUE(is_same(read.value().constants[0], at::ones({3})));
  for (size_t length = 0; length < message.value().size(); ++length)
    EXPECT_FALSE(read_prefix_message(std::span(message.value()).first(length))) << length;
}

}  // namespace
}  // namespace penstock::worker
