// SPDX-License-Identifier: Apache-2.0
#include "sampling/cost_packer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <span>

namespace penstock::sampling {
namespace {

std::vector<double> log_normal(size_t count, double median, double sigma, double most, uint32_t seed) {
  std::mt19937 random(seed);
  std::lognormal_distribution<double> lengths(std::log(median), sigma);
  std::vector<double> costs(count);
  for (double& cost : costs) cost = std::min(most, std::ceil(lengths(random)));
  return costs;
}

std::vector<int64_t> in_order(size_t count) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

double cost_of(const std::vector<double>& costs, const std::vector<int64_t>& batch) {
  double sum = 0;
  for (const int64_t index : batch) sum += costs[static_cast<size_t>(index)];
  return sum;
}

using Steps = std::vector<std::vector<std::vector<int64_t>>>;

Steps pack(const std::vector<double>& costs, const CostPackerOptions& options) {
  CostPacker packer(costs, in_order(costs.size()));
  Steps steps;
  for (auto step = packer.next(options); !step.empty(); step = packer.next(options)) steps.push_back(step);
  EXPECT_EQ(packer.left_count(), 0U);
  return steps;
}

void expect_each_sample_once(const Steps& steps, size_t count) {
  std::vector<int64_t> given;
  for (const auto& step : steps)
    for (const auto& batch : step) given.insert(given.end(), batch.begin(), batch.end());
  std::ranges::sort(given);
  EXPECT_EQ(given, in_order(count));
}

TEST(CostPacker, NoBatchIsBeyondTheBudgetAndEachSampleIsInOne) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const size_t ranks = 1 + seed % 9;
    const auto costs = log_normal(50 + seed * 37, 300, 0.3 + 0.1 * (seed % 12), 4096, seed);
    const auto steps = pack(costs, {.budget = 4096, .rank_count = ranks, .batch_size_max = seed % 4 * 5});
    expect_each_sample_once(steps, costs.size());
    for (const auto& step : steps) {
      ASSERT_EQ(step.size(), ranks);
      for (const auto& batch : step) {
        EXPECT_LE(cost_of(costs, batch), 4096);
        EXPECT_LE(batch.size(), seed % 4 == 0 ? costs.size() : seed % 4 * 5);
      }
    }
  }
}

// The most loaded of 8 ranks against their mean, over the steps of an epoch.
double imbalance(const std::vector<double>& costs, double budget) {
  double sum = 0;
  const auto steps = pack(costs, {.budget = budget, .rank_count = 8});
  for (const auto& step : steps) {
    std::vector<double> loads;
    for (const auto& batch : step) loads.push_back(cost_of(costs, batch));
    sum += std::ranges::max(loads) / (std::accumulate(loads.begin(), loads.end(), 0.0) / 8);
  }
  return sum / static_cast<double>(steps.size());
}

TEST(CostPacker, EightRanksOfLogNormalLengthsAreEven) {
  for (const double sigma : {0.5, 1.0, 1.5}) {
    for (const double budget : {2048.0, 4096.0, 16384.0}) {
      const auto lengths = log_normal(20000, 300, sigma, 2048, 7);
      EXPECT_LE(imbalance(lengths, budget), 1.02) << "sigma " << sigma << ", budget " << budget;
    }
  }
}

TEST(CostPacker, TheLastTwoStepsAreEven) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const auto lengths = log_normal(3000 + seed, 300, 1.0, 2048, seed);
    const auto steps = pack(lengths, {.budget = 8192, .rank_count = 8});
    for (const auto& step : std::span(steps).last(2)) {
      std::vector<double> loads;
      for (const auto& batch : step) loads.push_back(cost_of(lengths, batch));
      const double mean = std::accumulate(loads.begin(), loads.end(), 0.0) / 8;
      EXPECT_LE(std::ranges::max(loads) / mean, 1.05) << "seed " << seed;
    }
  }
}

TEST(CostPacker, SamplesOfOneCostKeepTheirOrder) {
  const auto steps = pack(std::vector<double>(12, 1.0), {.budget = 3, .rank_count = 2});
  EXPECT_EQ(steps, (Steps{{{0, 2, 4}, {1, 3, 5}}, {{6, 8, 10}, {7, 9, 11}}}));
}

TEST(CostPacker, TheLastStepMayHaveEmptyBatches) {
  const auto steps = pack({5, 5, 5, 5, 5}, {.budget = 5, .rank_count = 4});
  EXPECT_EQ(steps, (Steps{{{0}, {1}, {2}, {3}}, {{4}, {}, {}, {}}}));
}

TEST(CostPacker, CostsThatAreNoWholeNumbersStayWithinTheBudget) {
  std::vector<double> costs(500);
  std::mt19937 random(3);
  for (double& cost : costs) cost = 0.1 * (1 + random() % 30);
  for (const auto& step : pack(costs, {.budget = 3.0000000000000004, .rank_count = 3}))
    for (const auto& batch : step) EXPECT_LE(cost_of(costs, batch), 3.0000000000000004 * (1 + 1e-15));
}

}  // namespace
}  // namespace penstock::sampling
