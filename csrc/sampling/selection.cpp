// SPDX-License-Identifier: Apache-2.0
#include "sampling/selection.h"

#include <algorithm>

namespace penstock::sampling {
namespace {

constexpr int64_t kComparedMin = 64;
constexpr int64_t kComparedMax = 4096;
constexpr int64_t kRequestMax = 256;  // samples of one request
constexpr int64_t kRequests = 256;    // in a pass over a small dataset, at most

}  // namespace

std::vector<int64_t> samples_evaluated_twice(int64_t sample_count) {
  const int64_t count = std::min(sample_count, std::clamp(sample_count / 100, kComparedMin, kComparedMax));
  std::vector<int64_t> samples;
  samples.reserve(static_cast<size_t>(count));
  const int64_t steps = std::max<int64_t>(1, count - 1);
  const int64_t stride = (sample_count - 1) / steps;  // the products below would overflow without it
  const int64_t rest = (sample_count - 1) % steps;
  for (int64_t at = 0; at < count; ++at) samples.push_back(at * stride + at * rest / steps);
  return samples;
}

int64_t samples_per_request(int64_t sample_count) {
  return std::min(kRequestMax, (sample_count + kRequests - 1) / kRequests);
}

}  // namespace penstock::sampling
