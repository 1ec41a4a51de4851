// SPDX-License-Identifier: Apache-2.0
#pragma once
// A prefix in transit from the trainer to a worker, with its constants as tensors; wire/prefix_body.h defines its
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
  std::vector<at::Tensor> constants;  // in separately allocated memory
  uint64_t seed = 0;                  // of its random draws, before the batch is mixed in
  // The code compiled from it, if any, and the batch tensors that the code takes.
  std::string library = {};
  std::vector<runtime::LeafLayout> library_leaves = {};
  // The results of the trainer's kernels, and their settings.
  Numerics numerics = runtime::numeric_fingerprint();
  runtime::KernelSettings settings = runtime::KernelSettings::now();
};

// kMismatch when a constant is not a plain CPU tensor.
Result<std::vector<std::byte>> write_prefix_message(const PrefixMessage& message);

Result<PrefixMessage> read_prefix_message(std::span<const std::byte> message);

}  // namespace penstock::worker
