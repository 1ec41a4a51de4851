// SPDX-License-Identifier: Apache-2.0
#pragma once
// Puts batch records right after a random edit: what lies in them is kept, and what says how it is to be read is made
// to fit, mostly.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "base/bytes.h"
#include "fuzz_target.h"

namespace penstock::fuzz {

// Bytes to make an input of. Past their end they are zeros.
class Source {
 public:
  explicit Source(std::span<const std::byte> bytes) : bytes_(bytes) {}

  size_t left() const { return bytes_.size(); }

  template <PlainNumber T>
  T number() {
    T value{};
    const auto taken = take(sizeof(T));
    if (!taken.empty()) std::memcpy(&value, taken.data(), taken.size());
    return value;
  }

  // As many as there are, and `count` at most.
  std::span<const std::byte> take(size_t count) {
    const auto taken = bytes_.first(std::min(count, bytes_.size()));
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }

 private:
  std::span<const std::byte> bytes_;
};

// A nest of the rest of the source.
using RepairNest = Bytes (*)(Source& source, uint32_t leaf_count, Choices& choices);

// Of a batch: any values.
Bytes repair_nest(Source& source, uint32_t leaf_count, Choices& choices);

Bytes repair_record(std::span<const std::byte> record, RepairNest repair_nest, Choices& choices);

}  // namespace penstock::fuzz
