// SPDX-License-Identifier: Apache-2.0
#pragma once
// A grid of threads on the CPU: carries out what the kernels of a device would, one thread after the other.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "wire/widen_thread.h"

namespace penstock::wire {

// For each row, how many values stand before its own.
inline std::vector<uint64_t> row_starts(const Widening& widening, const std::byte* narrow) {
  if (widening.encoding != Encoding::kPadded) return {};
  std::vector<uint32_t> lengths(widening.row_count);
  std::memcpy(lengths.data(), narrow + sizeof(uint64_t), lengths.size() * sizeof(uint32_t));
  std::vector<uint64_t> starts(lengths.size());
  std::exclusive_scan(lengths.begin(), lengths.end(), starts.begin(), uint64_t{0});
  return starts;
}

// Every thread of the grid, in an order that `random` draws.
inline void widen_on_grid(const Widening& widening, const std::byte* narrow, std::byte* target, const GridSize& size,
                          std::mt19937_64& random) {
  const auto starts = row_starts(widening, narrow);
  const uint64_t columns = uint64_t{size.column_blocks} * size.block_columns;
  const uint64_t rows = uint64_t{size.row_blocks} * size.block_rows;
  std::vector<uint64_t> order(columns * rows);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  with_thread(widening, {.narrow = narrow, .starts = starts.data(), .target = target}, [&](const auto& thread) {
    for (const uint64_t number : order)
      thread({.column = number % columns, .row = number / columns, .column_step = columns, .row_step = rows});
  });
}

inline void widen_on_grid(const Widening& widening, const std::byte* narrow, std::byte* target) {
  std::mt19937_64 random(1);
  widen_on_grid(widening, narrow, target, grid_for(widening), random);
}

}  // namespace penstock::wire
