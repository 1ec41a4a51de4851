// SPDX-License-Identifier: Apache-2.0
#include "sampling/mixture_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/result.h"

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
  // The remainder from rounding is less than one unit, 1/kWhole, per source.
  *std::ranges::max_element(shares) += left;
  return shares;
}

MixtureSchedule::MixtureSchedule(const std::vector<int64_t>& shares)
    : MixtureSchedule(shares, std::vector<int64_t>(shares.size())) {}

MixtureSchedule::MixtureSchedule(std::vector<int64_t> shares, std::vector<int64_t> lags)
    : shares_(std::move(shares)), lags_(std::move(lags)) {
  PENSTOCK_ASSERT(shares_.size() == lags_.size() && shares_.size() <= kSourcesMax, "every share must have a lag");
  PENSTOCK_ASSERT(std::accumulate(shares_.begin(), shares_.end(), int64_t{0}) == kWhole,
                  "shares must add up to the whole");
  source_count_ = std::ranges::count_if(shares_, [](int64_t share) { return share > 0; });
}

// Each sample of a source is allowed from the time when the source lags behind by 1/(2k - 2), and it is due when the
// lag is 1 - 1/(2k - 2). Of the samples that are allowed, the one that is due first is given. So the samples that are
// due before some time are given as if there were no others, and whether one of them has been given depends only on the
// time since the first sample that is due later was allowed: at most 1/share of the slowest source. A schedule that
// starts that much earlier, having given the samples that are due first, reaches the same state.
MixtureSchedule MixtureSchedule::after(const std::vector<int64_t>& shares, int64_t sample_count) {
  MixtureSchedule schedule(shares);
  if (schedule.source_count_ == 1) return schedule;  // it never lags
  int64_t slowest = kWhole;
  for (const int64_t share : shares) slowest = share > 0 ? std::min(slowest, share) : slowest;
  const int64_t begin = sample_count - kWhole / slowest - 1;
  if (begin > 0) schedule.begin_near(begin);
  for (int64_t number = std::max<int64_t>(begin, 0); number < sample_count; ++number) schedule.next();
  return schedule;
}

void MixtureSchedule::begin_near(int64_t sample_count) {
  struct Waiting {
    size_t source;
    Wide time;  // until the sample is due, times `twice` and the share
  };
  const Wide twice = this->twice();
  std::vector<Waiting> waiting;  // samples that are allowed and not yet due
  Wide waiting_count = -static_cast<Wide>(sample_count);
  for (size_t source = 0; source < shares_.size(); ++source) {
    if (shares_[source] == 0) continue;
    const Wide whole_lag = static_cast<Wide>(sample_count) * shares_[source];
    const Wide units = twice * whole_lag - kWhole;
    const Wide allowed_count = units < 0 ? 0 : units / (twice * kWhole) + 1;
    waiting_count += allowed_count;
    lags_[source] = static_cast<int64_t>(whole_lag - allowed_count * kWhole);
    const Wide time = (twice - 1) * kWhole - twice * (lags_[source] + kWhole);
    if (allowed_count > 0 && time >= 0) waiting.push_back({source, time});
  }
  PENSTOCK_ASSERT(waiting_count >= 0 && waiting_count <= static_cast<Wide>(waiting.size()),
                  "a schedule returns one sample at a time");
  std::ranges::sort(waiting, [&](const Waiting& left, const Waiting& right) {
    const Wide left_time = left.time * shares_[right.source];
    const Wide right_time = right.time * shares_[left.source];
    return left_time != right_time ? left_time > right_time : left.source > right.source;
  });
  for (int64_t place = 0; place < static_cast<int64_t>(waiting_count); ++place)
    lags_[waiting[static_cast<size_t>(place)].source] += kWhole;
}

int64_t MixtureSchedule::samples_until_end(const std::vector<int64_t>& shares, std::span<const int64_t> lengths) {
  MixtureSchedule schedule(shares);
  const Wide twice = schedule.twice();
  Wide first = std::numeric_limits<int64_t>::max();  // the first sample, from 1, that a source may lack
  for (size_t source = 0; source < shares.size(); ++source) {
    if (shares[source] == 0) continue;
    if (schedule.source_count_ == 1) return lengths[source];
    const Wide lag = kWhole * (twice * lengths[source] + 1);
    const Wide share = twice * shares[source];
    first = std::min(first, (lag + share - 1) / share);
  }
  auto number = static_cast<int64_t>(first) - 1;
  for (schedule = after(shares, number);; ++number) {
    const size_t source = schedule.next();
    const Wide lag = static_cast<Wide>(number + 1) * shares[source] - schedule.lags_[source];
    if (lag / kWhole > lengths[source]) return number;
  }
}

int64_t MixtureSchedule::twice() const { return std::max<int64_t>(1, 2 * source_count_ - 2); }

size_t MixtureSchedule::next() {
  const Wide twice = this->twice();
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
  PENSTOCK_ASSERT(chosen.has_value(), "one source must be behind its share");
  lags_[*chosen] -= kWhole;
  return *chosen;
}

}  // namespace penstock::sampling
