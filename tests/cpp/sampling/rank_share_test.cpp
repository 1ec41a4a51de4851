// SPDX-License-Identifier: Apache-2.0
#include "sampling/rank_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace penstock::sampling {
namespace {

using Part = RankShare::Part;

RankShare share_of(uint64_t sample_count, RankShareOptions options) { return RankShare(sample_count, options); }

TEST(RankShare, AStepIsTheSameSamplesForAnyNumberOfRanks) {
  for (const uint64_t ranks : {1, 2, 3, 4, 6, 12}) {
    for (uint64_t step = 0; step < 5; ++step) {
      uint64_t place = step * 12;
      for (uint64_t rank = 0; rank < ranks; ++rank) {
        const auto share = share_of(60, {.rank = rank, .rank_count = ranks, .step_size = 12});
        EXPECT_EQ(share.step_count(), 5U);
        EXPECT_EQ(share.part(step), (Part{place, 12 / ranks}));
        place += 12 / ranks;
      }
    }
  }
}

TEST(RankShare, WhatIsLeftIsPaddedDroppedOrUneven) {
  const auto last = [](Remainder remainder, uint64_t rank) {
    const auto share = share_of(17, {.rank = rank, .rank_count = 3, .step_size = 6, .remainder = remainder});
    return share.part(share.step_count() - 1);
  };
  EXPECT_EQ(last(Remainder::kPad, 0), (Part{12, 2}));
  EXPECT_EQ(last(Remainder::kPad, 2), (Part{16, 2}));
  const RankShare padded(17, {.rank_count = 3, .step_size = 6});
  EXPECT_EQ(padded.step_samples(2), (std::vector<uint64_t>{12, 13, 14, 15, 16, 12})) << "the first one once more";
  EXPECT_EQ(last(Remainder::kDrop, 2), (Part{10, 2}));
  EXPECT_EQ(last(Remainder::kUneven, 0), (Part{12, 1}));
  EXPECT_EQ(last(Remainder::kUneven, 1), (Part{13, 2}));
  EXPECT_EQ(last(Remainder::kUneven, 2), (Part{15, 2}));
}

TEST(RankShare, EveryRankHasASampleOfTheLastStep) {
  for (const auto remainder : {Remainder::kPad, Remainder::kUneven}) {
    for (uint64_t rank = 0; rank < 4; ++rank) {
      const auto share = share_of(9, {.rank = rank, .rank_count = 4, .step_size = 8, .remainder = remainder});
      EXPECT_EQ(share.step_count(), 2U);
      EXPECT_EQ(share.part(1), (Part{8 + rank, 1}));
    }
  }
}

TEST(RankShare, AnEmptyOrderHasNoSteps) { EXPECT_EQ(share_of(0, {}).step_count(), 0U); }

// A job is stopped and resumed again and again with other numbers of ranks and other sizes of a step. Padding aside,
// every sample is given once.
TEST(RankShare, EverySampleIsGivenOnceAcrossChangesOfTheNumberOfRanks) {
  std::mt19937 random(11);
  for (int round = 0; round < 1000; ++round) {
    const uint64_t sample_count = random() % 300;
    const auto remainder = static_cast<Remainder>(random() % 3);
    std::vector<int> times(sample_count);
    uint64_t first_step = 0;
    uint64_t first_sample = 0;
    for (bool is_over = false; !is_over;) {
      const uint64_t ranks = 1 + random() % 8;
      RankShareOptions options{.rank_count = ranks,
                               .step_size = ranks + random() % 40,
                               .remainder = remainder,
                               .first_step = first_step,
                               .first_sample = first_sample};
      const uint64_t steps = share_of(sample_count, options).step_count();
      const uint64_t stop = std::min<uint64_t>(steps, first_step + random() % 9);
      is_over = stop == steps;
      uint64_t given = 0;
      for (options.rank = 0; options.rank < ranks; ++options.rank) {
        const auto share = share_of(sample_count, options);
        ASSERT_EQ(share.step_count(), steps) << "the ranks have as many steps each";
        ASSERT_EQ(share.samples_before(first_step), options.first_sample);
        for (uint64_t step = first_step; step < stop; ++step) {
          const Part part = share.part(step);
          ASSERT_GT(part.count, 0U);
          for (uint64_t place = part.first; place < part.first + part.count; ++place) {
            if (place >= sample_count) continue;  // padding
            ++times[place];
            ++given;
          }
        }
        first_sample = share.samples_before(stop);
      }
      ASSERT_EQ(given, first_sample - options.first_sample);
      first_step = stop;
    }
    const uint64_t dropped = sample_count - first_sample;
    ASSERT_TRUE(dropped == 0 || remainder == Remainder::kDrop);
    for (uint64_t place = 0; place < sample_count; ++place) ASSERT_EQ(times[place], place < first_sample ? 1 : 0);
  }
}

// Steps that were given in the past are given once more, by other numbers of ranks and with other sizes of a new step.
TEST(RankShare, StepsThatAreGivenAgainKeepTheirSamples) {
  std::mt19937 random(12);
  for (int round = 0; round < 1000; ++round) {
    const uint64_t sample_count = 1 + random() % 300;
    std::vector<int> times(sample_count);
    std::vector<uint64_t> missing;
    RankShareOptions options{.remainder = Remainder::kUneven};
    for (bool is_over = false; !is_over;) {
      options.rank_count = 1 + random() % 4;
      options.step_size = options.rank_count * (1 + random() % 10);
      const RankShare share(sample_count, options);
      const uint64_t stop = std::min<uint64_t>(share.step_count(), options.first_step + random() % 9);
      is_over = stop == share.step_count();
      for (uint64_t step = options.first_step; step < stop; ++step) missing.push_back(step);
      std::vector<uint64_t> kept;
      for (const uint64_t step : missing) {
        const Part whole = share.order_part(step);
        const bool is_given = (is_over || random() % 3 > 0) && share.can_divide(whole);
        if (!is_given) kept.push_back(step);
        std::vector<uint64_t> given;
        for (RankShareOptions of = options; is_given && of.rank < of.rank_count; ++of.rank) {
          const RankShare of_rank(sample_count, of);
          ASSERT_EQ(of_rank.order_part(step), whole);
          const auto samples = of_rank.samples(step);
          const auto again = RankShare::of_step(whole, of);
          ASSERT_EQ(again.part(0), of_rank.part(step));
          ASSERT_EQ(again.samples(0), samples);
          given.insert(given.end(), samples.begin(), samples.end());
        }
        if (is_given) {
          ASSERT_GE(given.size(), whole.count);
          for (uint64_t at = 0; at < whole.count; ++at) ASSERT_EQ(given[at], whole.first + at);
          for (uint64_t at = 0; at < whole.count; ++at) ++times[whole.first + at];
        }
      }
      missing = kept;
      options.first_sample = share.samples_before(stop);
      options.first_step = stop;
      options.earlier = share.runs_of(missing);
      ASSERT_TRUE(std::ranges::is_sorted(options.earlier, {}, &StepRun::first_step));
    }
    for (const uint64_t step : missing) {  // which these ranks cannot divide
      const RankShare share(sample_count, options);
      for (uint64_t at = 0; at < share.order_part(step).count; ++at) ++times[share.order_part(step).first + at];
    }
    ASSERT_EQ(std::ranges::count(times, 1), static_cast<ptrdiff_t>(sample_count));
  }
}

TEST(RankShare, StepsOfOneSizeAreOneRun) {
  const RankShare share(100, {.rank_count = 2, .step_size = 8});
  EXPECT_EQ(share.runs_of(std::vector<uint64_t>{1, 3, 12}), (std::vector<StepRun>{{1, 8, 8}}));
  const RankShare later(
      100, {.rank_count = 2, .step_size = 4, .first_step = 5, .first_sample = 40, .earlier = {{3, 24, 8}}});
  EXPECT_EQ(later.runs_of(std::vector<uint64_t>{3, 6, 9}), (std::vector<StepRun>{{3, 24, 8}, {6, 44, 4}}));
  EXPECT_EQ(later.samples_before(4), 32U);
  EXPECT_EQ(later.samples_before(6), 44U);
}

TEST(RankShare, StepThatRanksCannotDivideIsNoticed) {
  const auto can = [](Remainder remainder, Part step) {
    return RankShare(20, {.rank_count = 3, .step_size = 6, .remainder = remainder}).can_divide(step);
  };
  EXPECT_TRUE(can(Remainder::kPad, {8, 6}));
  EXPECT_FALSE(can(Remainder::kPad, {0, 8}));
  EXPECT_FALSE(can(Remainder::kDrop, {0, 8}));
  EXPECT_TRUE(can(Remainder::kUneven, {0, 8}));
  EXPECT_FALSE(can(Remainder::kUneven, {0, 2})) << "a rank would have no sample";
  EXPECT_TRUE(can(Remainder::kPad, {16, 4})) << "the last step is filled up";
  EXPECT_FALSE(can(Remainder::kDrop, {16, 4}));
}

// The owners of the samples of a step, by their places in an order.
std::vector<uint64_t> owners_in(const RankShare& share, uint64_t step, const std::vector<uint64_t>& order,
                                uint64_t ranks) {
  std::vector<uint64_t> owners;
  for (const uint64_t place : share.step_samples(step)) owners.push_back(owner_of(order[place], order.size(), ranks));
  return owners;
}

std::vector<uint64_t> shuffled(uint64_t count, uint64_t seed) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

TEST(RankShare, OwnersHaveEqualBlocksOfTheDataset) {
  for (const uint64_t ranks : {1U, 3U, 8U}) {
    std::vector<uint64_t> counts(ranks);
    uint64_t last = 0;
    for (uint64_t index = 0; index < 100; ++index) {
      const uint64_t owner = owner_of(index, 100, ranks);
      EXPECT_GE(owner, last);
      ++counts[last = owner];
    }
    const auto [least, most] = std::ranges::minmax(counts);
    EXPECT_LE(most - least, 1U);
  }
  EXPECT_EQ(owner_of((uint64_t{1} << 62) - 1, uint64_t{1} << 62, 1000), 999U);
}

TEST(RankShare, RanksThatTakeWhatTheyOwnHaveTheSamplesOfTheStepOnce) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const uint64_t ranks = 1 + random() % 9;
    const uint64_t count = 1 + random() % 200;
    const auto order = shuffled(count, random());
    RankShareOptions options{.rank_count = ranks,
                             .step_size = ranks + random() % 40,
                             .remainder = static_cast<Remainder>(random() % 3),
                             .first_step = random() % 3,
                             .first_sample = random() % (count + 1)};
    const RankShare any(count, options);
    for (uint64_t step = options.first_step; step < any.step_count(); ++step) {
      const auto owners = owners_in(any, step, order, ranks);
      std::vector<uint64_t> given;
      std::vector<uint64_t> of_runs;
      for (options.rank = 0; options.rank < ranks; ++options.rank) {
        const RankShare share(count, options);
        const auto places = share.owned_samples(step, owners);
        EXPECT_EQ(places, share.owned_samples(step, owners));
        EXPECT_EQ(places.size(), share.part(step).count) << "of the same size as a run";
        EXPECT_TRUE(std::ranges::is_sorted(places));
        given.insert(given.end(), places.begin(), places.end());
        for (uint64_t at = 0; at < share.part(step).count; ++at) of_runs.push_back(share.part(step).first + at);
      }
      std::ranges::sort(given);
      EXPECT_EQ(given, of_runs);
    }
  }
}

// The share of the samples that a rank owns, over an epoch.
double hits(uint64_t ranks, uint64_t step_size) {
  const uint64_t count = step_size * 64;
  const auto order = shuffled(count, 7);
  const RankShare any(count, {.rank_count = ranks, .step_size = step_size});
  uint64_t hit_count = 0;
  for (uint64_t step = 0; step < any.step_count(); ++step) {
    const auto owners = owners_in(any, step, order, ranks);
    for (uint64_t rank = 0; rank < ranks; ++rank) {
      const RankShare share(count, {.rank = rank, .rank_count = ranks, .step_size = step_size});
      for (const uint64_t place : share.owned_samples(step, owners))
        hit_count += owners[place - share.step_part(step).first] == rank ? 1U : 0U;
    }
  }
  return static_cast<double>(hit_count) / static_cast<double>(count);
}

TEST(RankShare, MostSamplesAreReadByTheirOwners) {
  EXPECT_NEAR(hits(8, 256), 0.935, 0.005);
  EXPECT_NEAR(hits(8, 1024), 0.967, 0.005);
  EXPECT_NEAR(hits(8, 4096), 0.983, 0.005);
  EXPECT_NEAR(hits(32, 256), 0.862, 0.005);
  EXPECT_NEAR(hits(32, 1024), 0.931, 0.005);
  EXPECT_NEAR(hits(32, 4096), 0.965, 0.005);
}

}  // namespace
}  // namespace penstock::sampling
