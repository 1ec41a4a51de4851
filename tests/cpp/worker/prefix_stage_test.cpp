// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_stage.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "batch_fixture.h"
#include "runtime/executor.h"
#include "runtime/kernel_settings.h"
#include "runtime/numeric_fingerprint.h"

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

// The boundary tensors, by key, that a prefix adds to a batch of four halves.
std::map<std::string, at::Tensor> made_by(const PrefixMessage& prefix) {
  const auto message = write_prefix_message(prefix);
  EXPECT_TRUE(message);
  PrefixStage stage;
  stage.install(message.value());
  BatchContent content{.tensors = {at::full({4}, 0.5)}, .boundary_keys = {}, .nest = {}};
  stage.run(content, 0, 0);
  std::map<std::string, at::Tensor> made;
  for (size_t i = 0; i < content.boundary_keys.size(); ++i)
    made[content.boundary_keys[i]] = content.tensors[content.tensors.size() - content.boundary_keys.size() + i];
  return made;
}

// x + 1 and log(x + 1) * 2.
const std::string kLogText =
    "penstock-ir 1\ninput %x leaf 0 float32 [n]\n%a = aten::add.Scalar(%x, 1)\n"
    "%l = aten::log(%a)\n%y = aten::mul.Scalar(%l, 2)\noutput %y key \"" +
    kKey + "\"\n";

Numerics altered(NumericFamily family) {
  Numerics numerics = runtime::numeric_fingerprint();
  numerics[static_cast<size_t>(family)] ^= 1;
  numerics[static_cast<size_t>(NumericFamily::kOther)] ^= 1;
  return numerics;
}

TEST(PrefixStage, AWorkerWithTheTrainersKernelsRunsAll) {
  const auto made = made_by({.text = kLogText, .constants = {}});
  ASSERT_EQ(made.size(), 1);
  EXPECT_TRUE(is_same(made.at(kKey), at::full({4}, 1.5).log().mul(2)));
}

TEST(PrefixStage, AFamilyThatThePrefixDoesNotNeedMayDiffer) {
  const auto made = made_by({.text = kLogText, .constants = {}, .numerics = altered(NumericFamily::kSums)});
  EXPECT_TRUE(made.contains(kKey));
}

TEST(PrefixStage, AWorkerWithOtherKernelsRunsTheExactPartAndTheTrainerTheRest) {
  const auto made = made_by({.text = kLogText, .constants = {}, .numerics = altered(NumericFamily::kExponential)});
  auto rest = runtime::PrefixRest::create(kLogText, {});
  ASSERT_TRUE(rest) << rest.error().message;
  ASSERT_EQ(rest.value().keys().size(), 1);
  ASSERT_EQ(made.size(), 1);
  EXPECT_FALSE(made.contains(kKey));
  const at::Tensor given = made.at(rest.value().keys()[0]);
  EXPECT_TRUE(is_same(given, at::full({4}, 1.5)));
  const auto outputs = rest.value().run(std::vector<at::Tensor>{at::full({4}, 0.5)}, {given});
  ASSERT_TRUE(outputs) << outputs.error().message;
  EXPECT_TRUE(is_same(outputs.value()[0], at::full({4}, 1.5).log().mul(2)));
}

TEST(PrefixStage, AWorkerWithOtherArithmeticRunsNothing) {
  EXPECT_TRUE(made_by({.text = kLogText, .constants = {}, .numerics = altered(NumericFamily::kArithmetic)}).empty());
}

TEST(PrefixStage, AnOperatorOfNoKnownFamilyNeedsAllToAgree) {
  const std::string text =
      "penstock-ir 1\ninput %x leaf 0 float32 [n]\n%y = aten::digamma(%x)\noutput %y key \"" + kKey + "\"\n";
  EXPECT_EQ(made_by({.text = text, .constants = {}}).size(), 1);
  EXPECT_TRUE(made_by({.text = text, .constants = {}, .numerics = altered(NumericFamily::kSums)}).empty());
}

TEST(PrefixStage, PrefixesRunUnderTheTrainersSettingsAndLeaveTheWorkersAlone) {
  const std::string text =
      "penstock-ir 1\ninput %x leaf 0 float32 [n]\n%y = aten::mul.Scalar(%x, 1e-39)\noutput %y "
      "key \"" +
      kKey + "\"\n";
  EXPECT_GT(made_by({.text = text, .constants = {}}).at(kKey)[0].item<float>(), 0.0F);
  auto settings = runtime::KernelSettings::now();
  settings.flushes_denormals = true;
  EXPECT_EQ(made_by({.text = text, .constants = {}, .settings = settings}).at(kKey)[0].item<float>(), 0.0F);
  EXPECT_FALSE(runtime::KernelSettings::now().flushes_denormals);
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

using wire::BlobId;

BlobId id_of(int number) {
  BlobId id{};
  id[0] = static_cast<std::byte>(number);
  return id;
}

std::string key_of(int number) { return std::string(32, static_cast<char>('0' + number)); }

class PrefixCacheTest : public testing::Test {
 protected:
  // One whose boundary tensor has the key of the number.
  void put(int number) {
    const auto message = write_prefix_message(
        {.text = "penstock-ir 1\ninput %x leaf 0 float32 [n]\n%y = aten::neg(%x)\noutput %y key \"" + key_of(number) +
                 "\"\n",
         .constants = {},
         .seed = 0,
         .library = {},
         .library_leaves = {}});
    ASSERT_TRUE(message);
    shelf_.put(id_of(number), message.value());
  }
  // The keys of the values made of a batch with those prefixes.
  std::vector<std::string> run(const std::vector<BlobId>& ids) {
    shelf_.select(ids, stage_);
    BatchContent content{.tensors = {at::ones({4})}, .boundary_keys = {}, .nest = {}};
    stage_.run(content, 0, 0);
    return content.boundary_keys;
  }

  PrefixCache shelf_;
  PrefixStage stage_;
};

using Keys = std::vector<std::string>;

TEST_F(PrefixCacheTest, ABatchIsMadeWithThePrefixesItNamesAndNoOthers) {
  put(1);
  put(2);
  EXPECT_EQ(run({id_of(1), id_of(2)}), (Keys{key_of(1), key_of(2)}));
  EXPECT_EQ(run({id_of(2)}), (Keys{key_of(2)}));
  EXPECT_EQ(run({}), (Keys{}));
  EXPECT_EQ(run({id_of(2)}), (Keys{key_of(2)}));
}

TEST_F(PrefixCacheTest, ThoseOfTheLastTwoListsAreKept) {
  put(1);
  run({id_of(1)});
  put(2);
  run({id_of(2)});
  EXPECT_TRUE(shelf_.has(id_of(1)));
  put(3);
  run({id_of(3)});
  EXPECT_FALSE(shelf_.has(id_of(1)));
  EXPECT_TRUE(shelf_.has(id_of(2)));
}

TEST_F(PrefixCacheTest, OneThatCannotBeReadOrIsNotThereIsLeftOut) {
  shelf_.put(id_of(1), {});
  put(2);
  EXPECT_TRUE(shelf_.has(id_of(1)));
  EXPECT_EQ(run({id_of(1), id_of(2), id_of(3)}), (Keys{key_of(2)}));
}

}  // namespace
}  // namespace penstock::worker
