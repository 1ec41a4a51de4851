// SPDX-License-Identifier: Apache-2.0
#pragma once
// The body of a prefix request: a batch record whose nest is the IR text and a seed, and whose tensors are the
// constants, so that a prefix travels in the same checked form as a batch. PROTOCOL.md has the bytes.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace penstock::worker {

struct PrefixMessage {
  std::string text;
  std::vector<at::Tensor> constants;  // in memory of their own
  uint64_t seed = 0;                  // of what it draws, before the batch is told
};

// kMismatch when a constant is not a plain CPU tensor.
Result<std::vector<std::byte>> write_prefix_message(std::string_view text, std::span<const at::Tensor> constants,
                                                    uint64_t seed);

Result<PrefixMessage> read_prefix_message(std::span<const std::byte> message);

}  // namespace penstock::worker
