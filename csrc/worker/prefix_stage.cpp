// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_stage.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "graph/ir_text.h"
#include "runtime/seeded_draws.h"
#include "worker/prefix_message.h"

namespace penstock::worker {

std::shared_ptr<LoadedPrefix> load_prefix(std::span<const std::byte> message) {
  auto read = read_prefix_message(message);
  if (!read) return nullptr;
  auto graph = graph::parse_graph(read.value().text);
  if (!graph) return nullptr;
  std::vector<std::string> keys;
  for (const auto& output : graph.value().outputs) keys.push_back(output.key);
  // A trainer ships an operator that draws only when its user has allowed that.
  auto executor =
      runtime::Executor::create(std::move(graph).value(), std::move(read.value().constants), {.allow_random = true});
  if (!executor) return nullptr;
  std::optional<runtime::CompiledPrefix> compiled;
  if (!read.value().library.empty()) {
    // One that cannot be loaded is no loss: the executor runs everything.
    auto loaded = runtime::CompiledPrefix::load(read.value().library, std::move(read.value().library_leaves));
    if (loaded) compiled.emplace(std::move(loaded).value());
  }
  const bool is_compiled = compiled.has_value();
  return std::make_shared<LoadedPrefix>(
      LoadedPrefix{.text = std::move(read.value().text),
                   .keys = std::move(keys),
                   .runner = PrefixRunner(std::move(executor).value(), std::move(compiled)),
                   .seed = read.value().seed,
                   .is_compiled = is_compiled});
}

void PrefixStage::install(std::shared_ptr<LoadedPrefix> prefix) {
  std::erase_if(prefixes_, [&](const auto& other) { return other->text == prefix->text; });
  // Where another prefix makes the same values, the compiled one makes them.
  const auto place = prefix->is_compiled ? prefixes_.begin() : prefixes_.end();
  prefixes_.insert(place, std::move(prefix));
}

bool PrefixStage::run(BatchContent& content, uint64_t epoch_seed, uint64_t sequence) {
  const std::vector<at::Tensor> leaves = content.tensors;
  bool is_compiled = false;
  for (const auto& each : prefixes_) {
    LoadedPrefix& prefix = *each;
    // Plans for a fixed and for any size compute the same values: once is enough.
    const bool is_done = std::all_of(prefix.keys.begin(), prefix.keys.end(), [&](const std::string& key) {
      return std::find(content.boundary_keys.begin(), content.boundary_keys.end(), key) != content.boundary_keys.end();
    });
    if (is_done || !prefix.runner.accepts(leaves)) continue;
    const auto made = prefix.runner.run(leaves, runtime::seed_of_batch(prefix.seed, epoch_seed, sequence));
    if (!made) continue;
    is_compiled = is_compiled || made.value().is_compiled;
    for (size_t index = 0; index < prefix.keys.size(); ++index) {
      const at::Tensor& output = made.value().tensors[index];
      const std::string& key = prefix.keys[index];
      const bool is_known =
          std::find(content.boundary_keys.begin(), content.boundary_keys.end(), key) != content.boundary_keys.end();
      if (is_known || key.size() != wire::kBoundaryKeyBytes || !is_plain_tensor(output)) continue;
      content.boundary_keys.push_back(key);
      content.tensors.push_back(output);
    }
  }
  return is_compiled;
}

}  // namespace penstock::worker
