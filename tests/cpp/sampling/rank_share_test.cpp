// SPDX-License-Identifier: Apache-2.0
#include "sampling/rank_share.h"

#include <gtest/gtest.h>

#include <algorithm>
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
  EXPECT_EQ(padded.sample_at(16), 16U);
  EXPECT_EQ(padded.sample_at(17), 12U) << "the first sample of the step once more";
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

}  // namespace
}  // namespace penstock::sampling
