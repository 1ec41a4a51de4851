// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random tensors in each narrow encoding, also in those that a worker would not choose for them.

#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "record_samples.h"
#include "wire/narrow.h"

namespace penstock::wire {

struct NarrowSample {
  TensorEntry entry;
  std::vector<std::byte> narrow;

  std::vector<std::byte> widened() const {
    std::vector<std::byte> wide(plain_bytes(entry), std::byte{0xee});
    const auto done = widen(entry, narrow, wide);
    PENSTOCK_ASSERT(done, done.error().message);
    return wide;
  }
};

inline std::vector<std::byte> random_bytes(size_t count, std::mt19937_64& random) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Bytes of elements: bools are 0 or 1.
inline std::vector<std::byte> random_items(size_t bytes, DTypeCode dtype, std::mt19937_64& random) {
  auto items = random_bytes(bytes, random);
  if (dtype == kDTypeBool)
    for (std::byte& byte : items) byte &= std::byte{1};
  return items;
}

template <typename T>
void append(std::vector<std::byte>& bytes, T value) {
  const auto* its = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), its, its + sizeof value);
}

inline DTypeCode random_dtype(Encoding encoding, std::mt19937_64& random) {
  static const std::vector<DTypeCode> kIntegers{2, 3, 4, 27, 28};
  static const std::vector<DTypeCode> kWords{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 23, 24, 25, 26, 27, 28, 29};
  static const std::vector<DTypeCode> kAll{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 23, 24, 25, 26, 27, 28, 29};
  if (encoding == Encoding::kBits) return 11;
  const auto& dtypes = encoding == Encoding::kRows ? kAll : encoding == Encoding::kPadded ? kWords : kIntegers;
  return dtypes[random() % dtypes.size()];
}

// Of these sizes: two at least, and the last at least 2, for padded rows.
inline NarrowSample narrow_of(Encoding encoding, DTypeCode dtype, std::vector<int64_t> shape, std::mt19937_64& random) {
  const auto first = static_cast<uint32_t>(shape.front());
  const auto last = static_cast<uint32_t>(shape.back());
  NarrowSample sample{.entry = make_entry(dtype, std::move(shape)), .narrow = {}};
  const uint64_t plain = sample.entry.bytes;
  const uint64_t item_bytes = dtype_bytes(sample.entry.dtype);
  switch (encoding) {
    case Encoding::kBits: sample.narrow = random_bytes((plain + 7) / 8, random); break;
    case Encoding::kRows: {
      const uint32_t distinct_count = 1 + static_cast<uint32_t>(random() % first);
      append(sample.narrow, distinct_count);
      for (uint32_t row = 0; row < first; ++row)
        append(sample.narrow, static_cast<uint32_t>(random() % distinct_count));
      const auto rows = random_items(distinct_count * (plain / first), dtype, random);
      sample.narrow.insert(sample.narrow.end(), rows.begin(), rows.end());
      break;
    }
    case Encoding::kPadded: {
      sample.narrow = random_items(sizeof(uint64_t), dtype, random);
      uint64_t kept_count = 0;
      for (uint64_t row = 0; row < plain / item_bytes / last; ++row) {
        const auto length = static_cast<uint32_t>(random() % (last + 1));
        append(sample.narrow, length);
        kept_count += length;
      }
      const auto values = random_items(kept_count * item_bytes, dtype, random);
      sample.narrow.insert(sample.narrow.end(), values.begin(), values.end());
      break;
    }
    default: {
      const uint64_t width = encoding == Encoding::kOffset8 ? 1 : encoding == Encoding::kOffset16 ? 2 : 4;
      sample.narrow = random_bytes(8 + plain / item_bytes * width, random);
    }
  }
  sample.entry.encoding = encoding;
  sample.entry.bytes = sample.narrow.size();
  return sample;
}

// Of up to `size_max` in each of one to three dimensions.
inline NarrowSample random_narrow(Encoding encoding, uint64_t size_max, std::mt19937_64& random) {
  std::vector<int64_t> shape(1 + random() % 3);
  if (encoding == Encoding::kPadded && shape.size() == 1) shape.push_back(0);
  for (int64_t& size : shape) size = 1 + static_cast<int64_t>(random() % size_max);
  if (encoding == Encoding::kPadded) ++shape.back();
  return narrow_of(encoding, random_dtype(encoding, random), std::move(shape), random);
}

// Of 64 MiB, as training has them: token ids, masks, features of users.
inline NarrowSample large_narrow(Encoding encoding, std::mt19937_64& random) {
  constexpr int64_t kMiB = 1 << 20;
  if (encoding == Encoding::kBits) return narrow_of(encoding, 11, {1024, kMiB / 16}, random);
  if (encoding == Encoding::kRows) return narrow_of(encoding, kDTypeFloat32, {4096, 4096}, random);
  return narrow_of(encoding, 4, {8192, 1024}, random);
}

constexpr Encoding kNarrowEncodings[] = {Encoding::kOffset8, Encoding::kOffset16, Encoding::kOffset32,
                                         Encoding::kBits,    Encoding::kRows,     Encoding::kPadded};

}  // namespace penstock::wire
