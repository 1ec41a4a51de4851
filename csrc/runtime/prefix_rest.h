// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's part of a prefix if a worker has run only the nodes that are exact everywhere.

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "graph/extract.h"
#include "runtime/executor.h"

namespace penstock::runtime {

// Confined to one thread.
class PrefixRest {
 public:
  // `text` is the prefix as workers have it, and `constants` are its constants in order. Returns kUnsupported if a
  // worker could not send any value.
  static Result<PrefixRest> create(std::string_view text, std::vector<at::Tensor> constants);

  // The keys of the values that such a worker sends.
  const std::vector<std::string>& keys() const { return split_.keys; }

  // Returns the outputs of the prefix in order: received ones unchanged, the others computed by the calling thread.
  // `given` are the values of keys() in that order, and `leaves` the leaves of the batch.
  Result<std::vector<at::Tensor>> run(std::span<const at::Tensor> leaves, std::vector<at::Tensor> given);

 private:
  Result<void> prepare(size_t leaf_count, std::vector<graph::GivenForm> forms);

  graph::Graph prefix_;
  std::vector<at::Tensor> constants_;
  graph::PrefixSplit split_;
  size_t leaf_count_ = 0;
  std::vector<graph::GivenForm> forms_;  // that the executor was made for
  std::optional<Executor> executor_;
};

}  // namespace penstock::runtime
