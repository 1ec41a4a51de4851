// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small random problems for plans: few enough units that every choice can be looked at.

#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "graph/effects.h"
#include "graph/ir.h"
#include "graph/price.h"

namespace penstock::graph {

inline uint32_t seed() {
  const char* given = std::getenv("PENSTOCK_TEST_SEED");
  return given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : 20240607;
}

struct Problem {
  Graph graph;
  std::vector<Verdict> verdicts;
  Calibration calibration;
  Prices prices;
};

// A random program: tensors, numbers, views, sizes of leaves, nodes that stay, groups that mix all of them.
inline Problem random_problem(std::mt19937& random) {
  Problem problem;
  Graph& graph = problem.graph;
  const auto chance = [&](uint32_t one_in) { return random() % one_in == 0; };
  std::vector<ValueKind> kinds;
  uint32_t storage_count = 0;
  const auto add = [&](ValueKind kind, std::optional<uint32_t> storage) {
    const ValueId value = graph.add_value("v" + std::to_string(graph.value_names.size()));
    kinds.push_back(kind);
    ValueSize size;
    if (kind == ValueKind::kTensor) {
      size.storage = storage.value_or(storage_count);
      size.bytes = storage ? 0 : static_cast<int64_t>(random() % 50) * 1000;
      storage_count += storage ? 0 : 1;
      if (storage)
        for (const ValueSize& other : problem.calibration.values)
          if (other.storage == *storage) size.bytes = other.bytes;
    }
    problem.calibration.values.push_back(size);
    return value;
  };
  const uint32_t leaf_count = 1 + random() % 3;
  for (uint32_t leaf = 0; leaf < leaf_count; ++leaf) {
    const bool shares = leaf > 0 && chance(3);
    const ValueId value = add(ValueKind::kTensor, shares ? std::optional(0u) : std::nullopt);
    graph.inputs.push_back({value, InputKind::kLeaf, leaf, {}, Dtype::kFloat32, {}, {}, {}});
  }
  graph.inputs.push_back({add(ValueKind::kTensor, {}), InputKind::kConst, 0, "c", Dtype::kFloat32, {}, {}, {}});
  graph.inputs.push_back({add(ValueKind::kTensor, {}), InputKind::kState, 0, "p", Dtype::kFloat32, {}, {}, {}});
  graph.inputs.push_back({add(ValueKind::kNumber, {}), InputKind::kInt, 0, "n", Dtype::kFloat32, {}, {}, SizeOf{0, 0}});
  const size_t node_count = 1 + random() % 9;
  for (size_t i = 0; i < node_count; ++i) {
    Node node{{}, "test::op", {}, {}, {}, "call", {}, {}};
    Traits traits;
    traits.purity = Purity::kPure;
    node.args.resize(random() % 3);
    for (Argument& argument : node.args)
      argument.data = ValueRef{static_cast<ValueId>(random() % graph.value_names.size())};
    if (chance(6)) traits.purity = Purity::kOpaque;
    std::optional<uint32_t> view_of;
    if (chance(4) && !node.args.empty()) {
      const ValueId base = node.args[0].get<ValueRef>()->id;
      if (kinds[base] == ValueKind::kTensor) view_of = problem.calibration.values[base].storage;
    }
    if (chance(5)) traits.purity = Purity::kMetadata;
    const bool makes_number = traits.purity == Purity::kMetadata || chance(6);
    traits.result_kinds = {makes_number ? ValueKind::kNumber : ValueKind::kTensor};
    node.results = {add(traits.result_kinds[0], makes_number ? std::nullopt : view_of)};
    if (chance(2)) node.group = random() % 4;
    graph.nodes.push_back(node);
    graph.traits.push_back(traits);
    problem.calibration.node_s.push_back(static_cast<double>(random() % 20) * 1e-6);
  }
  for (int i = 0; i < 2; ++i) graph.outputs.push_back({static_cast<ValueId>(random() % graph.value_names.size()), {}});
  problem.verdicts = analyse_effects(graph, {});
  problem.prices.worker_count = 1 + random() % 3;
  problem.prices.worker_second = chance(4) ? 1.0 : 0.25;
  problem.prices.trainer_node_s = static_cast<double>(random() % 5) * 1e-6;
  problem.prices.link_bytes_per_s = 1e9;
  problem.prices.raw_stays = chance(3);
  if (chance(2)) problem.prices.write_bytes_per_s = 2e9;
  if (chance(2)) problem.prices.read_bytes_per_s = 5e9;
  if (chance(2)) problem.prices.worker_scale = 0.5;
  if (problem.prices.worker_scale != 1) {
    problem.prices.receive_byte_s = 3e-10;
    problem.prices.send_byte_s = 2e-10;
  }
  return problem;
}

}  // namespace penstock::graph
