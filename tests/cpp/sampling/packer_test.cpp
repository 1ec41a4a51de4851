// SPDX-License-Identifier: Apache-2.0
#include "sampling/packer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace penstock::sampling {
namespace {

using Rows = std::vector<PackedRow>;

Rows pack(Packer& packer, const std::vector<int64_t>& lengths) {
  Rows rows;
  for (const int64_t length : lengths)
    for (PackedRow& row : packer.add(length)) rows.push_back(std::move(row));
  return rows;
}

Rows pack_all(const PackerOptions& options, const std::vector<int64_t>& lengths) {
  Packer packer(options);
  Rows rows = pack(packer, lengths);
  for (PackedRow& row : packer.flush()) rows.push_back(std::move(row));
  return rows;
}

// The same rule, written as a search of a list of all bins.
Rows rows_by_search(const PackerOptions& options, const std::vector<int64_t>& lengths) {
  struct Bin {
    int64_t room;
    PackedRow row;
  };
  std::vector<Bin> bins;  // the oldest one first
  Rows rows;
  const auto by_room = [](const Bin& a, const Bin& b) { return a.room < b.room; };
  for (size_t document = 0; document < lengths.size(); ++document) {
    int64_t first = 0;
    if (lengths[document] > options.row_length && !options.splits) continue;
    while (lengths[document] - first > options.row_length) {
      rows.push_back({{static_cast<int64_t>(document), first, options.row_length}});
      first += options.row_length;
    }
    const int64_t length = lengths[document] - first;
    if (length == 0) continue;
    const PackedPart part{static_cast<int64_t>(document), first, length};
    if (length == options.row_length) {
      rows.push_back({part});
      continue;
    }
    size_t best = bins.size();
    for (size_t at = 0; at < bins.size(); ++at)
      if (bins[at].room >= length && (best == bins.size() || bins[at].room < bins[best].room)) best = at;
    if (best == bins.size()) {
      if (bins.size() == options.bins_max) {
        const auto fullest = std::ranges::min_element(bins, by_room);
        rows.push_back(fullest->row);
        bins.erase(fullest);
      }
      best = bins.size();
      bins.push_back({options.row_length, {}});
    }
    bins[best].room -= length;
    bins[best].row.push_back(part);
    if (bins[best].room == 0) {
      rows.push_back(bins[best].row);
      bins.erase(bins.begin() + static_cast<std::ptrdiff_t>(best));
    }
  }
  std::ranges::stable_sort(bins, by_room);
  for (const Bin& bin : bins) rows.push_back(bin.row);
  return rows;
}

std::vector<int64_t> random_lengths(std::mt19937& random, int64_t row_length, size_t count) {
  std::vector<int64_t> lengths(count);
  for (int64_t& length : lengths)
    length = static_cast<int64_t>(random() % static_cast<uint64_t>(random() % 8 == 0 ? 3 * row_length : row_length));
  return lengths;
}

PackerOptions random_options(std::mt19937& random) {
  return {
      .row_length = 1 + static_cast<int64_t>(random() % 40), .bins_max = 1 + random() % 9, .splits = random() % 2 == 0};
}

TEST(Packer, RowsAreThoseOfASearchOfAllBins) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    const PackerOptions options = random_options(random);
    const auto lengths = random_lengths(random, options.row_length, 300);
    EXPECT_EQ(pack_all(options, lengths), rows_by_search(options, lengths)) << "round " << round;
  }
}

TEST(Packer, EveryTokenIsInOneRow) {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    PackerOptions options = random_options(random);
    options.splits = true;
    const auto lengths = random_lengths(random, options.row_length, 200);
    std::vector<std::vector<int>> seen;
    for (const int64_t length : lengths) seen.emplace_back(length, 0);
    for (const PackedRow& row : pack_all(options, lengths)) {
      int64_t used = 0;
      for (const PackedPart& part : row) {
        used += part.length;
        for (int64_t at = part.first; at < part.first + part.length; ++at)
          ++seen[static_cast<size_t>(part.document)][static_cast<size_t>(at)];
      }
      EXPECT_LE(used, options.row_length);
      EXPECT_GE(used, 1);
    }
    for (const auto& tokens : seen) EXPECT_TRUE(std::ranges::all_of(tokens, [](int count) { return count == 1; }));
  }
}

TEST(Packer, OneBinIsNextFit) {
  EXPECT_EQ(pack_all({.row_length = 10, .bins_max = 1}, {6, 3, 2, 9, 1}),
            (Rows{{{0, 0, 6}, {1, 0, 3}}, {{2, 0, 2}}, {{3, 0, 9}, {4, 0, 1}}}));
}

TEST(Packer, FullestBinIsClosedAndTheOldestOfEqualOnes) {
  // 5 fits neither 7 nor 6: the bin of 7 is closed. 4 then fits 6 exactly.
  EXPECT_EQ(pack_all({.row_length = 10, .bins_max = 2}, {7, 6, 5, 4}),
            (Rows{{{0, 0, 7}}, {{1, 0, 6}, {3, 0, 4}}, {{2, 0, 5}}}));
  EXPECT_EQ(pack_all({.row_length = 10, .bins_max = 2}, {7, 7, 3, 8}),
            (Rows{{{0, 0, 7}, {2, 0, 3}}, {{3, 0, 8}}, {{1, 0, 7}}}));
}

TEST(Packer, LongDocumentsAreSplitOrDroppedAndCounted) {
  Packer split({.row_length = 4, .bins_max = 2, .splits = true});
  EXPECT_EQ(pack(split, {9, 0, 8}), (Rows{{{0, 0, 4}}, {{0, 4, 4}}, {{2, 0, 4}}, {{2, 4, 4}}}));
  EXPECT_EQ(split.bins(), (Rows{{{0, 8, 1}}}));
  EXPECT_EQ(split.counts(),
            (PackerCounts{.documents = 3, .empty_documents = 1, .split_documents = 2, .rows = 4, .row_tokens = 16}));
  Packer drop({.row_length = 4, .bins_max = 2});
  EXPECT_EQ(pack(drop, {9, 4, 3}), (Rows{{{1, 0, 4}}}));
  EXPECT_EQ(drop.flush(), (Rows{{{2, 0, 3}}}));
  EXPECT_EQ(drop.counts(),
            (PackerCounts{.documents = 3, .dropped_documents = 1, .dropped_tokens = 9, .rows = 2, .row_tokens = 7}));
}

TEST(Packer, ContinuesFromItsBinsAtAnyDocument) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    const PackerOptions options = random_options(random);
    const auto lengths = random_lengths(random, options.row_length, 60);
    const Rows whole = pack_all(options, lengths);
    Rows rows;
    Packer packer(options);
    for (const int64_t length : lengths) {
      packer = Packer(options, packer.bins(), packer.counts());
      for (PackedRow& row : packer.add(length)) rows.push_back(std::move(row));
    }
    for (PackedRow& row : packer.flush()) rows.push_back(std::move(row));
    EXPECT_EQ(rows, whole) << "round " << round;
    EXPECT_EQ(packer.counts().rows, static_cast<int64_t>(whole.size()));
    Packer counting(options);
    counting.add_all(lengths);
    counting.flush();
    EXPECT_EQ(counting.counts(), packer.counts());
  }
}

TEST(Packer, ImpossibleBinsAreRecognised) {
  const PackerOptions options{.row_length = 4, .bins_max = 1};
  EXPECT_TRUE(Packer::can_continue(options, Rows{{{0, 0, 3}}}));
  EXPECT_TRUE(Packer::can_continue(options, Rows{}));
  for (const Rows& bins :
       {Rows{{}}, Rows{{{0, 0, 4}}}, Rows{{{0, 0, 2}, {1, 0, 2}}}, Rows{{{0, 0, 0}}}, Rows{{{-1, 0, 1}}},
        Rows{{{0, -1, 1}}}, Rows{{{0, 0, 1}}, {{1, 0, 1}}}, Rows{{{0, 0, 1}, {1, 0, INT64_MAX}}}})
    EXPECT_FALSE(Packer::can_continue(options, bins));
}

}  // namespace
}  // namespace penstock::sampling
