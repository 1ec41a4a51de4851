// SPDX-License-Identifier: Apache-2.0
#pragma once
// The work of one thread of a grid that widens a tensor: the kernels in device/widen_kernels.cu without their launch.
// It is ordinary C++, so the tests run it over whole grids on a CPU and compare every byte with wire::widen(). The
// result does not depend on the number of threads: each element is written once.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "wire/narrow.h"

#ifdef __CUDACC__
#define PENSTOCK_HOST_DEVICE __host__ __device__
#else
#define PENSTOCK_HOST_DEVICE
#endif

namespace penstock::wire {

// The start position of a thread, and its steps.
struct GridPlace {
  uint64_t column = 0;
  uint64_t row = 0;
  uint64_t column_step = 1;
  uint64_t row_step = 1;
};

// Narrow bytes, aligned to 8, and the tensor's bytes, aligned to the size of its elements (8 for bools).
struct WidenBuffers {
  const std::byte* narrow = nullptr;
  const uint64_t* starts = nullptr;  // of padded: for each row, the number of values before its own
  std::byte* target = nullptr;
};

// Element = offset + base, modulo 2^64. T is an unsigned integer of the element's size.
template <typename T, typename N>
struct OffsetThread {
  Widening widening;
  WidenBuffers buffers;

  PENSTOCK_HOST_DEVICE void operator()(const GridPlace& place) const {
    const auto* offsets = reinterpret_cast<const N*>(buffers.narrow + kBaseBytes);
    auto* items = reinterpret_cast<T*>(buffers.target);
    for (uint64_t item = place.column; item < widening.item_count; item += place.column_step)
      items[item] = static_cast<T>(offsets[item] + widening.constant);
  }
};

// A column is 8 bools.
struct BitsThread {
  Widening widening;
  WidenBuffers buffers;

  PENSTOCK_HOST_DEVICE void operator()(const GridPlace& place) const {
    const uint64_t whole = widening.item_count / 8;
    for (uint64_t eight = place.column; eight < whole; eight += place.column_step)
      reinterpret_cast<uint64_t*>(buffers.target)[eight] = spread(buffers.narrow[eight]);
    for (uint64_t item = whole * 8 + place.column; item < widening.item_count; item += place.column_step)
      buffers.target[item] = static_cast<std::byte>(spread(buffers.narrow[whole]) >> (8 * (item % 8)));
  }

 private:
  // Moves bit k to byte k.
  PENSTOCK_HOST_DEVICE static uint64_t spread(std::byte bits) {
    uint64_t bytes = 0;
    for (uint32_t place = 0; place < 8; ++place) bytes |= (static_cast<uint64_t>(bits) >> place & 1) << (8 * place);
    return bytes;
  }
};

template <typename Unit>
struct RowsThread {
  Widening widening;
  WidenBuffers buffers;

  PENSTOCK_HOST_DEVICE void operator()(const GridPlace& place) const {
    const auto* indices = reinterpret_cast<const uint32_t*>(buffers.narrow) + 1;
    const auto* units = reinterpret_cast<const Unit*>(indices + widening.row_count);
    auto* targets = reinterpret_cast<Unit*>(buffers.target);
    for (uint64_t row = place.row; row < widening.row_count; row += place.row_step) {
      const Unit* const source = units + indices[row] * widening.row_items;
      Unit* const target = targets + row * widening.row_items;
      for (uint64_t unit = place.column; unit < widening.row_items; unit += place.column_step)
        target[unit] = source[unit];
    }
  }
};

template <typename T>
struct PaddedThread {
  Widening widening;
  WidenBuffers buffers;

  PENSTOCK_HOST_DEVICE void operator()(const GridPlace& place) const {
    const auto* lengths = reinterpret_cast<const uint32_t*>(buffers.narrow + sizeof widening.constant);
    const auto* values = reinterpret_cast<const std::byte*>(lengths + widening.row_count);
    auto* targets = reinterpret_cast<T*>(buffers.target);
    for (uint64_t row = place.row; row < widening.row_count; row += place.row_step) {
      const std::byte* const source = values + buffers.starts[row] * sizeof(T);
      T* const target = targets + row * widening.row_items;
      const uint32_t length = lengths[row];
      for (uint64_t item = place.column; item < widening.row_items; item += place.column_step)
        target[item] = item < length ? load(source + item * sizeof(T)) : static_cast<T>(widening.constant);
    }
  }

 private:
  // 8-byte values may be at an odd multiple of 4.
  PENSTOCK_HOST_DEVICE static T load(const std::byte* place) {
    if constexpr (sizeof(T) == 8) {
      const auto* halves = reinterpret_cast<const uint32_t*>(place);
      return halves[0] | uint64_t{halves[1]} << 32;
    } else {
      return *reinterpret_cast<const T*>(place);
    }
  }
};

template <typename OnWord>
void with_word(uint32_t bytes, const OnWord& on_word) {
  switch (bytes) {
    case 1: return on_word(uint8_t{});
    case 2: return on_word(uint16_t{});
    case 4: return on_word(uint32_t{});
    default: return on_word(uint64_t{});
  }
}

// Calls on_thread with the thread type that widens such a tensor.
template <typename OnThread>
void with_thread(const Widening& widening, const WidenBuffers& buffers, const OnThread& on_thread) {
  if (widening.encoding == Encoding::kBits) return on_thread(BitsThread{widening, buffers});
  with_word(widening.item_bytes, [&](auto item) {
    using T = decltype(item);
    switch (widening.encoding) {
      case Encoding::kPadded: return on_thread(PaddedThread<T>{widening, buffers});
      case Encoding::kRows: return on_thread(RowsThread<T>{widening, buffers});
      case Encoding::kOffset8: return on_thread(OffsetThread<T, uint8_t>{widening, buffers});
      case Encoding::kOffset16: return on_thread(OffsetThread<T, uint16_t>{widening, buffers});
      default: return on_thread(OffsetThread<T, uint32_t>{widening, buffers});
    }
  });
}

// A grid of blocks of threads.
struct GridSize {
  uint32_t block_columns = 1;
  uint32_t block_rows = 1;
  uint32_t column_blocks = 1;
  uint32_t row_blocks = 1;
};

constexpr uint32_t kThreadsInBlock = 256;
constexpr uint32_t kBlocksMax = 8192;  // more than run at once on any device; beyond it, threads take several elements

inline GridSize grid_for(const Widening& widening) {
  const bool has_rows = widening.row_count > 0;
  const uint64_t columns = has_rows                               ? widening.row_items
                           : widening.encoding == Encoding::kBits ? bit_bytes(widening.item_count)
                                                                  : widening.item_count;
  const auto blocks = [](uint64_t count, uint64_t in_block, uint64_t count_max) {
    return static_cast<uint32_t>(std::clamp<uint64_t>((count + in_block - 1) / in_block, 1, count_max));
  };
  GridSize size;
  size.block_columns = has_rows
                           ? std::bit_ceil(static_cast<uint32_t>(std::clamp<uint64_t>(columns, 1, kThreadsInBlock)))
                           : kThreadsInBlock;
  size.block_rows = kThreadsInBlock / size.block_columns;
  size.column_blocks = blocks(columns, size.block_columns, kBlocksMax);
  size.row_blocks = has_rows ? blocks(widening.row_count, size.block_rows, kBlocksMax / size.column_blocks) : 1;
  return size;
}

}  // namespace penstock::wire
