// SPDX-License-Identifier: Apache-2.0
#include "loader/index_source.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randperm.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "../base/seeded_test.h"

namespace penstock::loader {
namespace {

const auto kIntegers = at::TensorOptions().dtype(at::kLong);

class PermutationTest : public testing::TestWithParam<int64_t> {
 protected:
  at::Generator of_torch_ = at::detail::createCPUGenerator(77);
  at::Generator ours_ = at::detail::createCPUGenerator(77);
};

TEST_P(PermutationTest, IsTorchs) {
  at::Tensor indices = at::empty({3}, kIntegers);
  for (int draw = 0; draw < 2; ++draw) {
    const at::Tensor expected = at::randperm(GetParam(), of_torch_, kIntegers);
    draw_permutation(indices, GetParam(), ours_);
    EXPECT_TRUE(indices.equal(expected));
    EXPECT_TRUE(ours_.get_state().equal(of_torch_.get_state()));
  }
}

TEST_P(PermutationTest, OneThatIsSkippedLeavesTheGeneratorBehindIt) {
  at::randperm(GetParam(), of_torch_, kIntegers);
  skip_permutation(GetParam(), ours_);
  EXPECT_TRUE(ours_.get_state().equal(of_torch_.get_state()));
}

INSTANTIATE_TEST_SUITE_P(Sizes, PermutationTest,
                         testing::Values(0, 1, 2, 63, 64, 65, 1000, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 1'000'003));

// TorchSampler against torch's BatchSampler over RandomSampler or SequentialSampler, said again here.

using Indices = std::vector<int64_t>;

// torch's samplers as generators of Python are: nothing happens before the first pull, and what follows the last index
// happens at the pull that finds none.
class TorchSamplers {
 public:
  explicit TorchSamplers(TorchSamplerOptions options) : options_(std::move(options)) {}

  std::optional<Indices> next_batch() {
    Indices batch;
    while (batch.size() < static_cast<size_t>(options_.batch_size)) {
      const auto index = next_index();
      if (!index) break;
      batch.push_back(*index);
    }
    const bool is_partial = batch.size() < static_cast<size_t>(options_.batch_size);
    if (batch.empty() || (options_.drop_last && is_partial)) return std::nullopt;
    return batch;
  }

 private:
  std::optional<int64_t> next_index() {
    if (!options_.shuffle) return position_ < options_.sample_count ? std::optional(position_++) : std::nullopt;
    if (is_done_) return std::nullopt;
    if (permutation_.empty()) {
      if (!options_.generator) {
        const auto seed = at::empty({}, at::kLong).random_().item<int64_t>();
        options_.generator = at::detail::createCPUGenerator();
        options_.generator->set_current_seed(static_cast<uint64_t>(seed));
      }
      permutation_ = draw_permutation();
    }
    if (position_ < options_.sample_count) return permutation_[static_cast<size_t>(position_++)];
    draw_permutation();  // the slice of no elements that torch takes of a fresh permutation
    is_done_ = true;
    return std::nullopt;
  }
  Indices draw_permutation() {
    const auto drawn = at::randperm(options_.sample_count, options_.generator, at::kLong);
    const auto* first = drawn.const_data_ptr<int64_t>();
    return {first, first + drawn.numel()};
  }

  TorchSamplerOptions options_;
  Indices permutation_;
  int64_t position_ = 0;
  bool is_done_ = false;
};

class TorchSamplerTest : public test::SeededTest {
 protected:
  static bool is_same_state(const at::Generator& left, const at::Generator& right) {
    return left.get_state().equal(right.get_state());
  }
  static at::Generator default_generator() { return at::detail::getDefaultCPUGenerator(); }

  // Pulls both in step and compares the indices, and after every pull the states of the generators.
  static void expect_as_torch(const TorchSamplerOptions& options, uint64_t seed) {
    default_generator().set_current_seed(seed);
    auto ours = options;
    auto torchs = options;
    if (options.generator) {
      ours.generator = options.generator->clone();
      torchs.generator = options.generator->clone();
    }
    TorchSampler stream(ours);
    TorchSamplers samplers(torchs);
    // The default generator is one for both, so each is given its turn from the same state.
    auto torchs_default = default_generator().clone();
    const auto in_torchs_turn = [&](const std::function<std::optional<Indices>()>& pull) {
      const auto saved = default_generator().get_state();
      default_generator().set_state(torchs_default.get_state());
      auto batch = pull();
      torchs_default.set_state(default_generator().get_state());
      default_generator().set_state(saved);
      return batch;
    };
    for (;;) {
      const auto expected = in_torchs_turn([&] { return samplers.next_batch(); });
      const auto given = stream.next_integers();
      ASSERT_EQ(given.has_value(), expected.has_value());
      ASSERT_TRUE(is_same_state(default_generator(), torchs_default));
      if (options.generator) {
        ASSERT_TRUE(is_same_state(*ours.generator, *torchs.generator));
      }
      if (!given) break;
      ASSERT_EQ(Indices(given->begin(), given->end()), *expected);
    }
    EXPECT_FALSE(stream.next_integers()) << "after its end";
    ASSERT_TRUE(is_same_state(default_generator(), torchs_default)) << "a pull after the end drew a number";
  }
};

TEST_F(TorchSamplerTest, RandomSettingsGiveTorchsIndicesAndLeaveTheGeneratorsWhereTorchDoes) {
  for (int round = 0; round < 400 && !HasFatalFailure(); ++round) {
    TorchSamplerOptions options{.sample_count = draw<int64_t>(1, 200),
                                .batch_size = draw<int64_t>(1, 40),
                                .drop_last = toss(),
                                .shuffle = toss(),
                                .generator = std::nullopt};
    if (toss()) options.generator = at::detail::createCPUGenerator(random()());
    expect_as_torch(options, random()());
  }
}

TEST_F(TorchSamplerTest, SkippedBatchesAreDrawnAndLeftOut) {
  for (int round = 0; round < 200 && !HasFailure(); ++round) {
    const uint64_t generator_seed = random()();
    const TorchSamplerOptions options{.sample_count = draw<int64_t>(0, 60),
                                      .batch_size = draw<int64_t>(1, 20),
                                      .drop_last = toss(),
                                      .shuffle = toss(),
                                      .generator = at::detail::createCPUGenerator(generator_seed)};
    auto resumed_options = options;
    resumed_options.generator = at::detail::createCPUGenerator(generator_seed);
    resumed_options.skipped_batch_count = draw<int64_t>(0, 30);
    TorchSampler whole(options);
    TorchSampler resumed(resumed_options);
    for (int64_t batch = 0; batch < resumed_options.skipped_batch_count; ++batch) whole.next_integers();
    for (bool is_more = true; is_more && !HasFailure();) {
      const auto expected = whole.next_integers();
      const auto given = resumed.next_integers();
      ASSERT_EQ(given.has_value(), expected.has_value());
      is_more = given.has_value();
      if (is_more) {
        ASSERT_EQ(Indices(given->begin(), given->end()), Indices(expected->begin(), expected->end()));
      }
      ASSERT_TRUE(is_same_state(*options.generator, *resumed_options.generator));
    }
  }
}

TEST_F(TorchSamplerTest, BatchesThatDivideTheSamplesEvenlyEndOnePullLater) {
  for (const bool drop_last : {false, true}) {
    expect_as_torch({.sample_count = 40,
                     .batch_size = 10,
                     .drop_last = drop_last,
                     .shuffle = true,
                     .generator = at::detail::createCPUGenerator(seed())},
                    seed());
  }
}

TEST_F(TorchSamplerTest, ABatchLargerThanTheSamplesIsOnePartialBatchOrNone) {
  for (const bool drop_last : {false, true}) {
    expect_as_torch({.sample_count = 5, .batch_size = 8, .drop_last = drop_last, .shuffle = true, .generator = {}},
                    seed());
  }
}

TEST_F(TorchSamplerTest, NoSamplesAreNoBatches) {
  expect_as_torch({.sample_count = 0, .batch_size = 8, .drop_last = false, .shuffle = false, .generator = {}}, seed());
}

TEST_F(TorchSamplerTest, NothingIsDrawnBeforeTheFirstPull) {
  const auto before = default_generator().clone();
  const TorchSampler stream({.sample_count = 10, .batch_size = 2, .shuffle = true, .generator = {}});
  EXPECT_TRUE(is_same_state(default_generator(), before));
}

TEST_F(TorchSamplerTest, AKnownSeedIsNotDrawn) {
  const TorchSamplerOptions drawn{.sample_count = 20, .batch_size = 20, .shuffle = true, .generator = {}};
  at::manual_seed(11);
  TorchSampler expected(drawn);
  const auto indices = *expected.next_integers();
  at::manual_seed(11);
  TorchSamplerOptions known = drawn;
  known.seed = static_cast<uint64_t>(at::empty({}, at::kLong).random_().item<int64_t>());
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  TorchSampler stream(known);
  EXPECT_TRUE(std::ranges::equal(*stream.next_integers(), indices));
  EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
}

TEST_F(TorchSamplerTest, AMillionShuffledSamplesComeOnceEach) {
  TorchSampler stream({.sample_count = 1'000'000, .batch_size = 4096, .shuffle = true, .generator = {}});
  std::vector<bool> has_come(1'000'000, false);
  size_t count = 0;
  while (const auto batch = stream.next_integers()) {
    for (const int64_t index : *batch) {
      ASSERT_FALSE(has_come[static_cast<size_t>(index)]);
      has_come[static_cast<size_t>(index)] = true;
    }
    count += batch->size();
  }
  EXPECT_EQ(count, 1'000'000u);
}

// An order that is written out would take 2^66 bytes.
TEST(TorchSampler, SamplesInOrderTakeNoMemory) {
  const int64_t count = std::numeric_limits<int64_t>::max();
  TorchSampler sampler({.sample_count = count, .batch_size = 3, .generator = {}, .skipped_batch_count = count / 3 - 1});
  EXPECT_TRUE(std::ranges::equal(*sampler.next_integers(), Indices{count - 4, count - 3, count - 2}));
  EXPECT_TRUE(std::ranges::equal(*sampler.next_integers(), Indices{count - 1}));
  EXPECT_FALSE(sampler.next_integers());
  TorchSampler rank({.sample_count = count,
                     .generator = {},
                     .skipped_batch_count = count / 6,
                     .share = sampling::RankShareOptions{.rank = 1, .rank_count = 2, .step_size = 6}});
  EXPECT_TRUE(std::ranges::equal(*rank.next_integers(), Indices{count - 1}));
  EXPECT_FALSE(rank.next_integers());
}

TEST(TorchSampler, ABatchOfMoreSamplesThanThereAreTakesNoMoreMemory) {
  const int64_t count = std::numeric_limits<int64_t>::max();
  TorchSampler sampler({.sample_count = 2, .batch_size = count, .generator = {}});
  EXPECT_TRUE(std::ranges::equal(*sampler.next_integers(), Indices{0, 1}));
}

// The batches of all ranks, step by step, one rank after the other.
std::vector<Indices> steps_of(int64_t sample_count, sampling::RankShareOptions share, bool shuffle = true) {
  std::vector<Indices> steps;
  for (share.rank = 0; share.rank < share.rank_count; ++share.rank) {
    TorchSampler sampler(
        {.sample_count = sample_count, .shuffle = shuffle, .generator = {}, .seed = 5, .share = share});
    size_t step = 0;
    for (auto batch = sampler.next_integers(); batch; batch = sampler.next_integers(), ++step) {
      steps.resize(std::max(steps.size(), step + 1));
      steps[step].insert(steps[step].end(), batch->begin(), batch->end());
    }
    EXPECT_TRUE(sampler.is_exhausted());
    EXPECT_EQ(step, steps.size());
  }
  return steps;
}

TEST(TorchSampler, RanksHaveTheirPartsOfOneOrder) {
  TorchSampler whole({.sample_count = 17, .batch_size = 6, .shuffle = true, .generator = {}, .seed = 5});
  std::vector<Indices> expected;
  for (auto batch = whole.next_integers(); batch; batch = whole.next_integers())
    expected.emplace_back(batch->begin(), batch->end());
  EXPECT_EQ(steps_of(17, {.rank_count = 1, .step_size = 6, .remainder = sampling::Remainder::kUneven}), expected);
  EXPECT_EQ(steps_of(17, {.rank_count = 2, .step_size = 6, .remainder = sampling::Remainder::kUneven}), expected);
  const std::vector<Indices> later(expected.begin() + 1, expected.end());
  EXPECT_EQ(steps_of(17, {.rank_count = 3,
                          .step_size = 6,
                          .remainder = sampling::Remainder::kUneven,
                          .first_step = 1,
                          .first_sample = 6}),
            later);
  expected.back().push_back(expected.back().front());
  EXPECT_EQ(steps_of(17, {.rank_count = 3, .step_size = 6, .remainder = sampling::Remainder::kPad}), expected);
  expected.pop_back();
  EXPECT_EQ(steps_of(17, {.rank_count = 3, .step_size = 6, .remainder = sampling::Remainder::kDrop}), expected);
}

TEST(TorchSampler, RanksShareAnOrderThatIsNotShuffled) {
  using sampling::Remainder;
  const auto with = [](Remainder remainder) {
    return sampling::RankShareOptions{.rank_count = 3, .step_size = 6, .remainder = remainder};
  };
  std::vector<Indices> expected = {{0, 1, 2, 3, 4, 5}, {6, 7, 8, 9, 10, 11}, {12, 13, 14, 15, 16}};
  EXPECT_EQ(steps_of(17, with(Remainder::kUneven), false), expected);
  expected.back().push_back(12);
  EXPECT_EQ(steps_of(17, with(Remainder::kPad), false), expected);
  expected.pop_back();
  EXPECT_EQ(steps_of(17, with(Remainder::kDrop), false), expected);
}

TEST(TorchSampler, ABatchSaysWhereItIsInTheOrder) {
  TorchSampler alone({.sample_count = 10, .batch_size = 4, .generator = {}});
  EXPECT_EQ(alone.next()->first_place, 0U);
  EXPECT_EQ(alone.next()->first_place, 4U);
  EXPECT_EQ(alone.next()->first_place, 8U);
  TorchSampler rank({.sample_count = 10,
                     .generator = {},
                     .skipped_batch_count = 1,
                     .share = sampling::RankShareOptions{.rank = 1, .rank_count = 2, .step_size = 4}});
  EXPECT_EQ(rank.next()->first_place, 6U);
}

}  // namespace
}  // namespace penstock::loader
