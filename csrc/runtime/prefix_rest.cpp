// SPDX-License-Identifier: Apache-2.0
#include "runtime/prefix_rest.h"

#include <algorithm>
#include <utility>

#include "capture/capture.h"
#include "capture/types.h"
#include "graph/ir_text.h"
#include "runtime/kernel_families.h"

namespace penstock::runtime {

Result<PrefixRest> PrefixRest::create(std::string_view text, std::vector<at::Tensor> constants) {
  auto graph = graph::parse_graph(text);
  if (!graph) return graph.error();
  PrefixRest rest;
  rest.prefix_ = std::move(graph).value();
  rest.constants_ = std::move(constants);
  capture::annotate(rest.prefix_);
  std::vector<bool> is_exact;
  for (const NumericFamily family : kernel_families(rest.prefix_))
    is_exact.push_back(family == NumericFamily::kArithmetic);
  rest.split_ = graph::split_prefix(rest.prefix_, is_exact);
  if (rest.split_.handed_over.empty())
    return Fault{Errc::kUnsupported, "no operator of the prefix returns the same bits on all CPUs"};
  return rest;
}

Result<void> PrefixRest::prepare(size_t leaf_count, std::vector<graph::GivenForm> forms) {
  if (executor_ && leaf_count == leaf_count_ && forms == forms_) return {};
  executor_.reset();
  auto part = graph::rest_of(prefix_, split_, forms, static_cast<uint32_t>(leaf_count));
  if (!part) return part.error();
  std::vector<at::Tensor> constants;
  for (const size_t index : graph::constants_of(part.value(), prefix_)) constants.push_back(constants_.at(index));
  auto executor = Executor::create(std::move(part).value(), std::move(constants));
  if (!executor) return executor.error();
  executor_.emplace(std::move(executor).value());
  leaf_count_ = leaf_count;
  forms_ = std::move(forms);
  return {};
}

Result<std::vector<at::Tensor>> PrefixRest::run(std::span<const at::Tensor> leaves, std::vector<at::Tensor> given) {
  if (given.size() != split_.handed_over.size())
    return Fault{Errc::kMismatch, "a worker sent " + std::to_string(given.size()) + " values instead of " +
                                      std::to_string(split_.handed_over.size())};
  std::vector<graph::GivenForm> forms;
  for (const at::Tensor& tensor : given) {
    const auto dtype = capture::dtype_from_torch(tensor.scalar_type());
    if (!dtype) return Fault{Errc::kUnsupported, "a value of " + tensor.toString() + " was sent"};
    forms.push_back({.dtype = *dtype, .rank = static_cast<uint32_t>(tensor.dim())});
  }
  if (auto prepared = prepare(leaves.size(), std::move(forms)); !prepared) return prepared.error();
  std::vector<at::Tensor> all(leaves.begin(), leaves.end());
  all.insert(all.end(), given.begin(), given.end());
  auto computed = executor_->run(all);
  if (!computed) return computed.error();
  std::vector<at::Tensor> outputs;
  size_t computed_index = 0;
  for (const graph::Output& output : prefix_.outputs) {
    const auto found = std::ranges::find(split_.handed_over, output.value);
    outputs.push_back(found == split_.handed_over.end()
                          ? computed.value().at(computed_index++)
                          : given[static_cast<size_t>(found - split_.handed_over.begin())]);
  }
  return outputs;
}

}  // namespace penstock::runtime
