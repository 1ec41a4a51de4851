// SPDX-License-Identifier: Apache-2.0
#include "sampling/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace penstock::sampling {
namespace {

TEST(Selection, SamplesEvaluatedTwiceAreEvenlySpacedFromFirstToLast) {
  for (const int64_t count : {1, 2, 63, 64, 65, 500, 6'400, 20'001, 409'600, 5'000'000}) {
    const std::vector<int64_t> samples = samples_evaluated_twice(count);
    EXPECT_EQ(samples.front(), 0);
    EXPECT_EQ(samples.back(), count - 1);
    const auto wanted = std::min(count, std::max<int64_t>(64, std::min<int64_t>(4096, count / 100)));
    ASSERT_EQ(static_cast<int64_t>(samples.size()), wanted);
    int64_t least = count;
    int64_t most = 0;
    for (size_t at = 1; at < samples.size(); ++at) {
      least = std::min(least, samples[at] - samples[at - 1]);
      most = std::max(most, samples[at] - samples[at - 1]);
    }
    if (count > 1) {
      EXPECT_GE(least, 1) << count;
      EXPECT_LE(most, least + 1) << count;
    }
  }
  EXPECT_TRUE(samples_evaluated_twice(0).empty());
  EXPECT_EQ(samples_evaluated_twice(std::numeric_limits<int64_t>::max()).back(),
            std::numeric_limits<int64_t>::max() - 1);
}

TEST(Selection, RequestsAreShortForSmallDatasets) {
  EXPECT_EQ(samples_per_request(1), 1);
  EXPECT_EQ(samples_per_request(257), 2);
  EXPECT_EQ(samples_per_request(1'000'000), 256);
}

}  // namespace
}  // namespace penstock::sampling
