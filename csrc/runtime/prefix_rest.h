// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's part of a prefix of which a worker has run only the nodes that are exact everywhere.

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
  // Of a prefix as workers have it, with its constants in order. kUnsupported where a worker could hand nothing over.
  static Result<PrefixRest> create(std::string_view text, std::vector<at::Tensor> constants);

  // The keys of the values that such a worker sends.
  const std::vector<std::string>& keys() const { return split_.keys; }

  // The outputs of the prefix in order: those that were handed over as they are, the others computed by the calling
  // thread. `given` are the values of keys() in that order, and `leaves` those of the batch.
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
