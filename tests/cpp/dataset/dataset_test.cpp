// SPDX-License-Identifier: Apache-2.0
#include "penstock/sampler.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "penstock/error.h"

namespace penstock {
namespace {

std::vector<int64_t> all_of(DistributedSampler& sampler, int64_t batch_size) {
  std::vector<int64_t> indices;
  sampler.begin_epoch(0);
  while (const auto batch = sampler.next(batch_size)) indices.insert(indices.end(), batch->begin(), batch->end());
  return indices;
}

// list(torch.utils.data.DistributedSampler(range(10), 3, rank, seed=5)) after set_epoch(2), of torch 2.11.
TEST(DistributedSampler, HasTheIndicesOfPythons) {
  const std::vector<std::vector<int64_t>> expected = {{5, 4, 9, 2}, {0, 1, 6, 5}, {3, 7, 8, 0}};
  for (int64_t rank = 0; rank < 3; ++rank) {
    DistributedSampler sampler(10, {.num_replicas = 3, .rank = rank, .seed = 5});
    sampler.set_epoch(2);
    EXPECT_EQ(all_of(sampler, 3), expected[static_cast<size_t>(rank)]) << rank;
    EXPECT_EQ(sampler.size(), 4);
  }
}

TEST(DistributedSampler, DropsWhatCannotBeSharedOutEvenly) {
  DistributedSampler sampler(10, {.num_replicas = 3, .rank = 1, .shuffle = false, .drop_last = true});
  EXPECT_EQ(all_of(sampler, 2), (std::vector<int64_t>{1, 4, 7}));
}

TEST(DistributedSampler, GivesTheFirstSamplesAgainWhereThereAreMoreRanksThanSamples) {
  DistributedSampler sampler(2, {.num_replicas = 5, .rank = 4, .shuffle = false});
  EXPECT_EQ(all_of(sampler, 2), (std::vector<int64_t>{0}));
}

TEST(DistributedSampler, AnOrderThatIsNotShuffledTakesNoMemory) {
  const int64_t size = std::numeric_limits<int64_t>::max();
  DistributedSampler sampler(size, {.num_replicas = 4, .rank = 3, .shuffle = false});
  sampler.begin_epoch(0);
  EXPECT_EQ(sampler.next(3), (std::vector<int64_t>{3, 7, 11}));
  EXPECT_EQ(sampler.size(), size / 4 + 1);
}

TEST(DistributedSampler, ARankBeyondTheLastIsRefused) {
  EXPECT_THROW(DistributedSampler(10, {.num_replicas = 2, .rank = 2}), Error);
  EXPECT_THROW(DistributedSampler(0, {}), Error);
}

}  // namespace
}  // namespace penstock
