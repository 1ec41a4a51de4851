// SPDX-License-Identifier: Apache-2.0
#include "cache/belady_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cache/fill_once.h"

namespace penstock::cache {
namespace {

using Keys = std::vector<int64_t>;
using Steps = std::vector<Keys>;

Steps random_steps(std::mt19937& random, size_t step_count, size_t step_size_max, int64_t key_count) {
  std::uniform_int_distribution<size_t> sizes(0, step_size_max);
  std::geometric_distribution<int64_t> keys(2.0 / static_cast<double>(key_count));
  Steps steps(step_count);
  for (Keys& step : steps) {
    step.resize(sizes(random));
    std::ranges::generate(step, [&] { return keys(random) % key_count; });
  }
  return steps;
}

Keys joined(const Steps& steps) {
  Keys all;
  for (const Keys& step : steps) all.insert(all.end(), step.begin(), step.end());
  return all;
}

// Reads all steps, with `window` steps known ahead of each.
BeladyCache read_all(const Steps& steps, uint64_t capacity, size_t window) {
  BeladyCache cache(capacity);
  for (size_t step = 0; step < steps.size(); ++step) {
    while (cache.foreseen_count() < window + 1 && step + cache.foreseen_count() < steps.size())
      cache.foresee(steps[step + cache.foreseen_count()]);
    const Keys before = cache.slots(steps[step]);
    const auto outcome = cache.read(steps[step]);
    EXPECT_EQ(outcome.slots_before, before);
    EXPECT_EQ(outcome.slots_after, cache.slots(steps[step]));
    EXPECT_LE(cache.kept_count(), capacity);
    for (const int64_t slot : outcome.slots_after) EXPECT_LT(slot, static_cast<int64_t>(capacity));
  }
  return cache;
}

// The fewest misses of any cache, by trying every choice of keys to keep after every read.
uint64_t fewest_misses(const Keys& keys, uint64_t capacity) {
  std::map<std::set<int64_t>, uint64_t> misses_by_kept = {{{}, 0}};
  for (const int64_t key : keys) {
    std::map<std::set<int64_t>, uint64_t> next;
    const auto offer = [&](const std::set<int64_t>& kept, uint64_t misses) {
      const auto [known, is_new] = next.emplace(kept, misses);
      if (!is_new) known->second = std::min(known->second, misses);
    };
    for (const auto& [kept, misses] : misses_by_kept) {
      const uint64_t now = misses + !kept.contains(key);
      offer(kept, now);
      auto with = kept;
      with.insert(key);
      if (with.size() <= capacity) offer(with, now);
      for (const int64_t other : kept) {
        auto replaced = with;
        replaced.erase(other);
        if (replaced.size() <= capacity) offer(replaced, now);
      }
    }
    misses_by_kept = std::move(next);
  }
  return std::ranges::min_element(misses_by_kept, {}, [](const auto& one) { return one.second; })->second;
}

// Belady's rule with the whole future, by searching it for every decision.
uint64_t misses_of_offline_rule(const Keys& keys, uint64_t capacity) {
  std::set<int64_t> kept;
  uint64_t misses = 0;
  for (size_t place = 0; place < keys.size(); ++place) {
    const auto next_read = [&](int64_t key) { return std::find(keys.begin() + place + 1, keys.end(), key); };
    misses += !kept.contains(keys[place]);
    kept.insert(keys[place]);
    if (kept.size() > capacity)
      kept.erase(*std::ranges::max_element(kept, {}, [&](int64_t key) { return next_read(key) - keys.begin(); }));
  }
  return misses;
}

uint64_t misses_of_least_recently_used(const Keys& keys, uint64_t capacity) {
  std::list<int64_t> kept;
  uint64_t misses = 0;
  for (const int64_t key : keys) {
    const auto found = std::ranges::find(kept, key);
    misses += found == kept.end();
    if (found != kept.end()) kept.erase(found);
    kept.push_back(key);
    if (kept.size() > capacity) kept.pop_front();
  }
  return misses;
}

TEST(BeladyCache, MissesAreTheFewestPossible) {
  std::mt19937 random(1);
  for (int round = 0; round < 150; ++round) {
    const Steps steps = random_steps(random, 8, 4, 6);
    for (const uint64_t capacity : {0, 1, 2, 3}) {
      const BeladyCache cache = read_all(steps, capacity, steps.size());
      ASSERT_EQ(cache.miss_count(), fewest_misses(joined(steps), capacity)) << round << ", capacity " << capacity;
      ASSERT_EQ(cache.hit_count() + cache.miss_count(), joined(steps).size());
    }
  }
}

TEST(BeladyCache, MissesEqualThoseOfTheOfflineRule) {
  std::mt19937 random(2);
  for (const uint64_t capacity : {1, 7, 40, 200}) {
    const Steps steps = random_steps(random, 60, 30, 300);
    const uint64_t misses = misses_of_offline_rule(joined(steps), capacity);
    EXPECT_EQ(read_all(steps, capacity, steps.size()).miss_count(), misses);
    EXPECT_LT(misses, misses_of_least_recently_used(joined(steps), capacity));
  }
}

TEST(BeladyCache, KeepsTheMostRecentKeysIfNothingIsKnown) {
  std::mt19937 random(3);
  for (const uint64_t capacity : {1, 5, 50}) {
    Steps steps = random_steps(random, 400, 1, 100);
    EXPECT_EQ(read_all(steps, capacity, 0).miss_count(), misses_of_least_recently_used(joined(steps), capacity));
  }
}

TEST(BeladyCache, AWiderWindowHasFewerMisses) {
  std::mt19937 random(4);
  const Steps steps = random_steps(random, 200, 20, 300);
  uint64_t before = joined(steps).size();
  for (const size_t window : {0, 4, 40}) {
    const uint64_t misses = read_all(steps, 60, window).miss_count();
    EXPECT_LT(misses, before) << "window of " << window;
    before = misses;
  }
}

TEST(BeladyCache, SlotsHoldTheRowsOfTheirKeys) {
  std::mt19937 random(5);
  const Steps steps = random_steps(random, 300, 12, 60);
  BeladyCache cache(16);
  Keys rows(16, -1);
  std::set<int64_t> kept;
  for (size_t step = 0; step < steps.size(); ++step) {
    while (cache.foreseen_count() < 6 && step + cache.foreseen_count() < steps.size())
      cache.foresee(steps[step + cache.foreseen_count()]);
    const auto outcome = cache.read(steps[step]);
    for (size_t place = 0; place < steps[step].size(); ++place) {
      const int64_t slot = outcome.slots_before[place];
      if (slot == BeladyCache::kNoSlot) continue;
      ASSERT_EQ(rows[static_cast<size_t>(slot)], steps[step][place]);
    }
    for (const int64_t key : outcome.evicted) ASSERT_EQ(kept.erase(key), 1U);
    for (size_t place = 0; place < steps[step].size(); ++place) {
      const int64_t slot = outcome.slots_after[place];
      if (slot == BeladyCache::kNoSlot) continue;
      rows[static_cast<size_t>(slot)] = steps[step][place];
      kept.insert(steps[step][place]);
    }
    ASSERT_EQ(kept.size(), cache.kept_count());
  }
}

TEST(BeladyCache, AnotherStepThanAnnouncedForgetsWhatWasAnnounced) {
  BeladyCache cache(1);
  cache.foresee(Keys{1});
  cache.foresee(Keys{2});
  cache.foresee(Keys{1});
  cache.read(Keys{1});
  EXPECT_EQ(cache.foreseen_count(), 2U);
  cache.read(Keys{3});
  EXPECT_EQ(cache.foreseen_count(), 0U);
  EXPECT_EQ(cache.slots(Keys{1, 3}), (Keys{BeladyCache::kNoSlot, 0})) << "1 is no longer known to be read";
  cache.foresee(Keys{3});
  cache.read(Keys{3});
  EXPECT_EQ(cache.hit_count(), 1U);
}

TEST(BeladyCache, CountsSizes) {
  BeladyCache cache(10);
  cache.foresee(Keys{1, 2, 3, 4});
  cache.foresee(Keys{2, 1, 3});
  const std::vector<uint64_t> sizes = {6, 4, 5, 11};
  cache.read(Keys{1, 2, 3, 4}, sizes);
  EXPECT_EQ(cache.kept_size(), 10U);
  EXPECT_EQ(cache.slots(Keys{1, 2, 3, 4}), (Keys{0, 1, -1, -1})) << "3 is read later, 4 is larger than the cache";
  cache.foresee(Keys{5});
  const auto step = cache.read(Keys{2, 1, 3}, std::vector<uint64_t>{4, 6, 5});
  EXPECT_EQ(step.evicted, (Keys{2, 1})) << "without 2 there is still no room for 3";
  EXPECT_EQ(cache.slots(Keys{3}), Keys{0});
  EXPECT_EQ(cache.kept_size(), 5U);
}

TEST(FillOnce, AdmitsWhatFits) {
  std::atomic<uint64_t> admitted = 0;
  FillOnce policy(admitted, 10);
  EXPECT_EQ(policy.admit(6), 0U);
  EXPECT_EQ(policy.admit(5), std::nullopt);
  EXPECT_EQ(policy.admit(4), 6U);
  EXPECT_EQ(policy.left_bytes(), 0U);
  EXPECT_EQ(policy.admit(1), std::nullopt);
  EXPECT_EQ(policy.admit(~uint64_t{0}), std::nullopt);
  EXPECT_EQ(admitted, 10U);
}

TEST(FillOnce, ThreadsNeverShareAPlace) {
  std::atomic<uint64_t> admitted = 0;
  std::vector<Keys> places(4);
  {
    std::vector<std::jthread> threads;
    for (Keys& own : places)
      threads.emplace_back([&own, &admitted] {
        FillOnce policy(admitted, 30'000);
        while (const auto place = policy.admit(3)) own.push_back(static_cast<int64_t>(*place));
      });
  }
  std::set<int64_t> all;
  for (const Keys& own : places) all.insert(own.begin(), own.end());
  EXPECT_EQ(all.size(), 10'000U);
}

}  // namespace
}  // namespace penstock::cache
