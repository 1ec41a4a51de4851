// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_stage.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "capture/capture.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "runtime/kernel_families.h"
#include "runtime/numeric_fingerprint.h"
#include "runtime/seeded_draws.h"
#include "worker/prefix_message.h"

namespace penstock::worker {

namespace {

// The part of a prefix that this process may run, with its constants in order; empty if that part has no node.
struct RunnablePart {
  graph::Graph graph;
  std::vector<at::Tensor> constants;
};

std::optional<RunnablePart> runnable_part(graph::Graph graph, std::vector<at::Tensor> constants, FamilySet differing) {
  if (differing == 0) return RunnablePart{std::move(graph), std::move(constants)};
  capture::annotate(graph);
  std::vector<bool> is_exact;
  FamilySet needed = 0;
  for (const NumericFamily family : runtime::kernel_families(graph)) {
    needed |= set_of(family);
    is_exact.push_back(family == NumericFamily::kArithmetic);
  }
  if ((needed & differing) == 0) return RunnablePart{std::move(graph), std::move(constants)};
  if ((differing & set_of(NumericFamily::kArithmetic)) != 0) return std::nullopt;
  const graph::PrefixSplit split = graph::split_prefix(graph, is_exact);
  if (split.handed_over.empty()) return std::nullopt;
  auto front = graph::front_of(graph, split);
  if (!front) return std::nullopt;
  RunnablePart part{std::move(front).value(), {}};
  for (const size_t index : graph::constants_of(part.graph, graph)) {
    if (index >= constants.size()) return std::nullopt;
    part.constants.push_back(constants[index]);
  }
  return part;
}

}  // namespace

std::shared_ptr<LoadedPrefix> load_prefix(std::span<const std::byte> message) {
  auto read = read_prefix_message(message);
  if (!read) return nullptr;
  auto graph = graph::parse_graph(read.value().text);
  if (!graph) return nullptr;
  const runtime::KernelSettingsGuard settings(read.value().settings);
  const FamilySet differing = differing_families(read.value().numerics, runtime::numeric_fingerprint());
  auto part = runnable_part(std::move(graph).value(), std::move(read.value().constants), differing);
  if (!part) return nullptr;
  std::vector<std::string> keys;
  for (const auto& output : part->graph.outputs) keys.push_back(output.key);
  // A trainer ships operators that draw random numbers only if its user has allowed it.
  auto executor = runtime::Executor::create(std::move(part->graph), std::move(part->constants), {.allow_random = true});
  if (!executor) return nullptr;
  std::optional<runtime::CompiledPrefix> compiled;
  // Code that was compiled on a machine with different kernels may be for another CPU.
  if (!read.value().library.empty() && differing == 0) {
    // A library that cannot be loaded is no loss: the executor runs everything.
    auto loaded = runtime::CompiledPrefix::load(read.value().library, std::move(read.value().library_leaves));
    if (loaded) compiled.emplace(std::move(loaded).value());
  }
  const bool is_compiled = compiled.has_value();
  return std::make_shared<LoadedPrefix>(
      LoadedPrefix{.text = std::move(read.value().text),
                   .keys = std::move(keys),
                   .runner = PrefixRunner(std::move(executor).value(), std::move(compiled)),
                   .seed = read.value().seed,
                   .is_compiled = is_compiled,
                   .settings = read.value().settings});
}

void PrefixStage::install(std::shared_ptr<LoadedPrefix> prefix) {
  std::erase_if(prefixes_, [&](const auto& other) { return other->text == prefix->text; });
  // If another prefix makes the same values, the compiled one is preferred.
  const auto place = prefix->is_compiled ? prefixes_.begin() : prefixes_.end();
  prefixes_.insert(place, std::move(prefix));
}

bool PrefixStage::run(BatchContent& content, uint64_t epoch_seed, uint64_t sequence) {
  const std::vector<at::Tensor> leaves = content.tensors;
  bool is_compiled = false;
  for (const auto& each : prefixes_) {
    LoadedPrefix& prefix = *each;
    // Plans for a fixed size and for any size compute the same values: computing them once is enough.
    const bool is_done = std::all_of(prefix.keys.begin(), prefix.keys.end(), [&](const std::string& key) {
      return std::find(content.boundary_keys.begin(), content.boundary_keys.end(), key) != content.boundary_keys.end();
    });
    if (is_done || !prefix.runner.accepts(leaves)) continue;
    const runtime::KernelSettingsGuard settings(prefix.settings);
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
