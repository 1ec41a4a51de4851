// SPDX-License-Identifier: Apache-2.0
#include "sampling/mixture_schedule.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/assert.h"

namespace penstock::sampling {

namespace {

using Wide = __int128;

}  // namespace

std::vector<int64_t> MixtureSchedule::shares_of(std::span<const double> weights) {
  const double largest = *std::ranges::max_element(weights);
  double sum = 0;  // of weights below 1, so that no sum is infinite
  for (const double weight : weights) sum += weight / largest;
  std::vector<int64_t> shares(weights.size());
  int64_t left = kWhole;
  for (size_t source = 0; source < weights.size(); ++source) {
    if (weights[source] == 0) continue;
    const double exact = std::floor(weights[source] / largest / sum * static_cast<double>(kWhole));
    shares[source] = std::max<int64_t>(1, static_cast<int64_t>(exact));
    left -= shares[source];
  }
  // What rounding left over is less than one unit a source, of 2^40.
  *std::ranges::max_element(shares) += left;
  return shares;
}

MixtureSchedule::MixtureSchedule(const std::vector<int64_t>& shares)
    : MixtureSchedule(shares, std::vector<int64_t>(shares.size())) {}

MixtureSchedule::MixtureSchedule(std::vector<int64_t> shares, std::vector<int64_t> lags)
    : shares_(std::move(shares)), lags_(std::move(lags)) {
  PENSTOCK_ASSERT(shares_.size() == lags_.size() && shares_.size() <= kSourcesMax, "a lag for each share is expected");
  PENSTOCK_ASSERT(std::accumulate(shares_.begin(), shares_.end(), int64_t{0}) == kWhole, "shares add up to the whole");
  source_count_ = std::ranges::count_if(shares_, [](int64_t share) { return share > 0; });
}

size_t MixtureSchedule::next() {
  const Wide twice = std::max<int64_t>(1, 2 * source_count_ - 2);
  std::optional<size_t> chosen;
  Wide chosen_time = 0;  // until the source has to give a sample, times `twice` and its share
  for (size_t source = 0; source < shares_.size(); ++source) {
    if (shares_[source] == 0) continue;
    lags_[source] += shares_[source];
    const Wide lag = twice * lags_[source];
    if (source_count_ > 1 && lag < kWhole) continue;
    const Wide time = (twice - 1) * kWhole - lag;
    if (!chosen || time * shares_[*chosen] < chosen_time * shares_[source]) {
      chosen = source;
      chosen_time = time;
    }
  }
  PENSTOCK_ASSERT(chosen.has_value(), "some source lags behind its share");
  lags_[*chosen] -= kWhole;
  return *chosen;
}

}  // namespace penstock::sampling
