// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_stage.h"

#include <algorithm>
#include <utility>

#include "graph/ir_text.h"
#include "runtime/seeded_draws.h"
#include "worker/prefix_message.h"

namespace penstock::worker {

void PrefixStage::install(std::span<const std::byte> message) {
  auto read = read_prefix_message(message);
  if (!read) return;
  auto graph = graph::parse_graph(read.value().text);
  if (!graph) return;
  std::vector<std::string> keys;
  for (const auto& output : graph.value().outputs) keys.push_back(output.key);
  // A trainer ships an operator that draws only when its user has allowed that.
  auto executor =
      runtime::Executor::create(std::move(graph).value(), std::move(read.value().constants), {.allow_random = true});
  if (!executor) return;
  prefixes_.push_back({.keys = std::move(keys), .executor = std::move(executor).value(), .seed = read.value().seed});
}

void PrefixStage::run(BatchContent& content, uint64_t epoch_seed, uint64_t sequence) {
  const std::vector<at::Tensor> leaves = content.tensors;
  for (const Prefix& prefix : prefixes_) {
    // Plans for a fixed and for any size compute the same values: once is enough.
    const bool is_done = std::all_of(prefix.keys.begin(), prefix.keys.end(), [&](const std::string& key) {
      return std::find(content.boundary_keys.begin(), content.boundary_keys.end(), key) != content.boundary_keys.end();
    });
    if (is_done || !prefix.executor.accepts(leaves)) continue;
    auto outputs = prefix.executor.run(leaves, runtime::seed_of_batch(prefix.seed, epoch_seed, sequence));
    if (!outputs) continue;
    for (size_t index = 0; index < prefix.keys.size(); ++index) {
      const at::Tensor& output = outputs.value()[index];
      const std::string& key = prefix.keys[index];
      const bool is_known =
          std::find(content.boundary_keys.begin(), content.boundary_keys.end(), key) != content.boundary_keys.end();
      if (is_known || key.size() != transport::kKeyBytes || !is_plain_tensor(output)) continue;
      content.boundary_keys.push_back(key);
      content.tensors.push_back(output);
    }
  }
}

}  // namespace penstock::worker
