// SPDX-License-Identifier: Apache-2.0
#pragma once
// One prefix in a worker: the executor, and the compiled library once it has arrived, for as long as both give
// identical bits.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/result.h"
#include "runtime/compiled_prefix.h"
#include "runtime/compiled_trial.h"
#include "runtime/executor.h"

namespace penstock::worker {

struct Boundary {
  std::vector<at::Tensor> tensors;
  bool is_compiled = false;  // made entirely by compiled code
};

// Confined to the thread that serves requests.
class PrefixRunner {
 public:
  PrefixRunner(runtime::Executor executor, std::optional<runtime::CompiledPrefix> compiled)
      : executor_(std::move(executor)), compiled_(std::move(compiled)) {}

  bool accepts(std::span<const at::Tensor> leaves) const { return static_cast<bool>(executor_.accepts(leaves)); }

  // The boundary tensors of an accepted batch; `seed` seeds its random draws.
  Result<Boundary> run(std::span<const at::Tensor> leaves, uint64_t seed);

 private:
  Result<Boundary> compare(std::span<const at::Tensor> leaves, uint64_t seed);

  runtime::Executor executor_;
  std::optional<runtime::CompiledPrefix> compiled_;
  runtime::CompiledTrial trial_;
};

}  // namespace penstock::worker
