// SPDX-License-Identifier: Apache-2.0
#pragma once
// The body of a prefix request: a batch record whose nest contains the IR text, a seed, the compiled library, and the
// numerics and settings of the trainer's kernels, and whose tensors are the constants, so that a prefix is sent in the
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

// A tensor of the batch as expected by the compiled library.
struct PrefixLeaf {
  uint32_t leaf_index = 0;
  DTypeCode dtype = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  friend bool operator==(const PrefixLeaf&, const PrefixLeaf&) = default;
};

// The trainer's settings that determine its results. Precisions are values of torch's enumeration.
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
  TensorEntry entry;  // its offset counts from the first byte of the constants; the writer sets it
  std::span<const std::byte> bytes;
};

// Text, library and the constants' bytes are views of the message that was read, or of the memory to be written.
struct PrefixBody {
  std::string_view text;
  uint64_t seed = 0;
  std::string_view library;
  std::vector<PrefixLeaf> library_leaves;
  std::vector<PrefixConstant> constants;
  Numerics numerics{};
  PrefixSettings settings{};
};

// The constants' entries must match their bytes, except for the offsets.
std::vector<std::byte> write_prefix_body(const PrefixBody& body);

Result<PrefixBody> parse_prefix_body(std::span<const std::byte> bytes);

}  // namespace penstock::wire
