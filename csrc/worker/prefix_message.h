// SPDX-License-Identifier: Apache-2.0
#pragma once
// A prefix on its way from the trainer to a worker, with its constants as tensors; wire/prefix_body.h has its
// bytes.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "runtime/compiled_prefix.h"
#include "runtime/kernel_settings.h"
#include "runtime/numeric_fingerprint.h"

namespace penstock::worker {

struct PrefixMessage {
  std::string text;
  std::vector<at::Tensor> constants;  // in memory of their own
  uint64_t seed = 0;                  // of its draws, before the batch is told
  // The code that was compiled of it, if there is any, and the tensors of the batch that the code takes.
  std::string library = {};
  std::vector<runtime::LeafLayout> library_leaves = {};
  // What the trainer's kernels compute, and under which settings.
  Numerics numerics = runtime::numeric_fingerprint();
  runtime::KernelSettings settings = runtime::KernelSettings::now();
};

// kMismatch when a constant is not a plain CPU tensor.
Result<std::vector<std::byte>> write_prefix_message(const PrefixMessage& message);

Result<PrefixMessage> read_prefix_message(std::span<const std::byte> message);

}  // namespace penstock::worker
