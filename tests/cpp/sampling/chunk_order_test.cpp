// SPDX-License-Identifier: Apache-2.0
#include "sampling/chunk_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace penstock::sampling {
namespace {

using Indices = std::vector<int64_t>;

Indices take(ChunkOrder& order, size_t count) {
  Indices indices(count);
  indices.resize(order.next(indices));
  return indices;
}

Indices all_of(const Indices& lengths, const ChunkOrderOptions& options) {
  ChunkOrder order(lengths, options);
  return take(order, static_cast<size_t>(order.left_count()));
}

size_t chunk_of(const Indices& lengths, int64_t index) {
  size_t chunk = 0;
  for (; index >= lengths[chunk]; ++chunk) index -= lengths[chunk];
  return chunk;
}

// How often processes read a chunk if each of `process_count` gets every so-many-th run, keeps `kept_max` chunks, and
// drops the one that it has not read for the longest time, or whose samples it has all read.
size_t reads_of(const Indices& lengths, const ChunkOrderOptions& options, size_t process_count, size_t kept_max) {
  struct Kept {
    size_t chunk;
    int64_t left;
  };
  std::vector<std::vector<Kept>> processes(process_count);
  size_t reads = 0;
  size_t number = 0;
  for (const int64_t index : all_of(lengths, options)) {
    auto& kept = processes[number++ / static_cast<size_t>(options.run_length) % process_count];
    const size_t chunk = chunk_of(lengths, index);
    auto found = std::ranges::find(kept, chunk, &Kept::chunk);
    Kept used{.chunk = chunk, .left = lengths[chunk]};
    if (found == kept.end()) {
      ++reads;
      if (kept.size() == kept_max) kept.erase(kept.begin());
    } else {
      used = *found;
      kept.erase(found);
    }
    if (--used.left > 0) kept.push_back(used);
  }
  return reads;
}

TEST(ChunkOrder, EverySampleIsGivenOnce) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    Indices lengths(1 + random() % 40);
    for (int64_t& length : lengths) length = static_cast<int64_t>(random() % 30);  // 0 as well
    const ChunkOrderOptions options{.open_max = 1 + random() % 20,
                                    .reader_count = 1 + random() % 9,
                                    .run_length = 1 + static_cast<int64_t>(random() % 25),
                                    .shuffle = round % 4 > 0,
                                    .key = random()};
    Indices given = all_of(lengths, options);
    std::ranges::sort(given);
    Indices expected(static_cast<size_t>(std::accumulate(lengths.begin(), lengths.end(), int64_t{0})));
    std::iota(expected.begin(), expected.end(), int64_t{0});
    ASSERT_EQ(given, expected) << "round " << round;
  }
}

TEST(ChunkOrder, SkippingAndReadingInPartsLeadToTheSameOrder) {
  std::mt19937 random(2);
  for (int round = 0; round < 100; ++round) {
    Indices lengths(1 + random() % 20);
    for (int64_t& length : lengths) length = static_cast<int64_t>(random() % 30);
    const ChunkOrderOptions options{.open_max = 1 + random() % 6,
                                    .reader_count = 1 + random() % 4,
                                    .run_length = 1 + static_cast<int64_t>(random() % 9),
                                    .shuffle = round % 4 > 0,
                                    .key = random()};
    const Indices expected = all_of(lengths, options);
    ChunkOrder order(lengths, options);
    for (size_t at = 0; at < expected.size();) {
      const size_t count = 1 + random() % 40;
      if (random() % 2 == 0) {
        order.skip(static_cast<int64_t>(count));
      } else {
        const Indices part = take(order, count);
        ASSERT_TRUE(std::equal(part.begin(), part.end(), expected.begin() + static_cast<std::ptrdiff_t>(at)));
        ASSERT_EQ(part.size(), std::min(count, expected.size() - at));
      }
      at += count;
    }
    EXPECT_EQ(order.left_count(), 0);
    EXPECT_TRUE(take(order, 1).empty());
  }
}

TEST(ChunkOrder, ReaderKeepsAWindowOfChunksAndReadsEachOnce) {
  const Indices lengths(200, 50);
  EXPECT_EQ(reads_of(lengths, {.open_max = 16, .key = 3}, 1, 16), 200U);
  EXPECT_GT(reads_of(lengths, {.open_max = 16, .key = 3}, 1, 8), 2000U) << "the window is 16 chunks";
}

TEST(ChunkOrder, ProcessesOfABatchEachInTurnReadEachChunkOnce) {
  const Indices lengths(240, 50);  // 12,000 samples, 1,500 or 3,000 of a reader
  for (const size_t processes : {1U, 2U, 4U, 8U}) {
    const ChunkOrderOptions options{.open_max = 4, .reader_count = 8, .run_length = 25, .key = 4};
    EXPECT_EQ(reads_of(lengths, options, processes, 4 * 8 / processes), 240U) << processes << " processes";
  }
  // Parts that end within a chunk: it is read for both, and stays in memory until it is the oldest one.
  const ChunkOrderOptions cut{.open_max = 4, .reader_count = 8, .run_length = 32, .key = 5};
  EXPECT_EQ(reads_of(Indices(241, 49), cut, 8, 4 + 2), 241U + 7);
  // Without readers, every process reads nearly every chunk.
  EXPECT_GT(reads_of(lengths, {.open_max = 16, .run_length = 25, .key = 4}, 4, 16), 900U);
}

TEST(ChunkOrder, ChunksAreOpenedOneAfterTheOther) {
  const Indices lengths(400, 100);
  std::set<size_t> seen;
  std::vector<size_t> opened;  // in each span of 400 samples
  size_t number = 0;
  for (const int64_t index : all_of(lengths, {.open_max = 16, .key = 6})) {
    if (number++ % 400 == 0) opened.push_back(0);
    if (seen.insert(chunk_of(lengths, index)).second) ++opened.back();
  }
  // 4 on average. At equal rates it was all 16 of a window.
  for (size_t span = 8; span < opened.size(); ++span) EXPECT_LE(opened[span], 11U) << "span " << span;
}

// All permutations are equally likely: chi-squared, 23 degrees of freedom.
TEST(ChunkOrder, OpenWindowOfAllChunksIsAShuffle) {
  std::map<Indices, int> counts;
  for (uint64_t key = 0; key < 4800; ++key) ++counts[all_of({1, 2, 1}, {.open_max = 3, .key = key})];
  ASSERT_EQ(counts.size(), 24U);
  double distance = 0;
  for (const auto& [order, count] : counts) distance += (count - 200.0) * (count - 200.0) / 200.0;
  EXPECT_LT(distance, 49.7);  // exceeded once in 1,000 times
}

TEST(ChunkOrder, OrderWithoutShufflingIsInSequence) {
  EXPECT_EQ(all_of({2, 0, 3}, {.shuffle = false}), (Indices{0, 1, 2, 3, 4}));
  EXPECT_EQ(all_of({4, 3}, {.reader_count = 2, .run_length = 2, .shuffle = false}), (Indices{0, 1, 4, 5, 2, 3, 6}));
}

// Saved states depend on it.
TEST(ChunkOrder, OrderStaysTheSame) {
  EXPECT_EQ(all_of({3, 4, 2, 3}, {.open_max = 2, .key = 7}), (Indices{9, 11, 1, 10, 8, 0, 7, 6, 3, 2, 5, 4}));
  EXPECT_EQ(all_of({3, 4, 2, 3}, {.open_max = 2, .reader_count = 2, .run_length = 2, .key = 1U << 31}),
            (Indices{1, 8, 5, 10, 7, 0, 9, 6, 2, 11, 4, 3}));
}

}  // namespace
}  // namespace penstock::sampling
