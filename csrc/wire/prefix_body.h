// SPDX-License-Identifier: Apache-2.0
#pragma once
// The body of a prefix request: a batch record whose nest is the IR text, a seed, the compiled library, and what the
// trainer's kernels compute under which settings, and whose tensors are the constants, so that a prefix travels in the
// same checked form as a batch. PROTOCOL.md has the bytes.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/numerics.h"
#include "base/result.h"
#include "wire/dtype.h"
#include "wire/frame.h"

namespace penstock::wire {

// A tensor of the batch as the compiled library expects it.
struct PrefixLeaf {
  uint32_t leaf_index = 0;
  DTypeCode dtype = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  friend bool operator==(const PrefixLeaf&, const PrefixLeaf&) = default;
};

// The settings of the trainer that its results follow from. Precisions are those of torch's enumeration.
struct PrefixSettings {
  bool flushes_denormals = false;
  bool is_deterministic = false;
  bool uses_mkldnn = true;
  uint8_t matmul_precision = 0;
  uint8_t convolution_precision = 0;
  DTypeCode default_dtype = kDTypeFloat32;

  friend bool operator==(const PrefixSettings&, const PrefixSettings&) = default;
};

struct PrefixConstant {
  TensorEntry entry;  // its offset counts from the first constant's byte; the writer sets it
  std::span<const std::byte> bytes;
};

// Text, library and the constants' bytes are views: of the message that was read, or of the memory that is to be
// written.
struct PrefixBody {
  std::string_view text;
  uint64_t seed = 0;
  std::string_view library;
  std::vector<PrefixLeaf> library_leaves;
  std::vector<PrefixConstant> constants;
  Numerics numerics{};
  PrefixSettings settings{};
};

// The constants' entries must be right for their bytes, offsets aside.
std::vector<std::byte> write_prefix_body(const PrefixBody& body);

Result<PrefixBody> parse_prefix_body(std::span<const std::byte> bytes);

}  // namespace penstock::wire
