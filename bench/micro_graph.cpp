// SPDX-License-Identifier: Apache-2.0
// The time that the cut takes to decide, and the overhead of the executor for each operator.

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <random>
#include <sstream>
#include <string>

#include "graph/ir_text.h"
#include "graph/min_cut.h"
#include "runtime/executor.h"
#include "runtime/kernel_settings.h"

namespace {

using penstock::graph::FlowNetwork;

// A closure problem as plans pose them: each node may need a few that came before it, and gains or costs something.
FlowNetwork random_closure(uint32_t count) {
  std::mt19937 random(20240607);
  FlowNetwork network;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t node = network.add_node();
    const auto gain = static_cast<int64_t>(random() % 2'000'001) - 1'000'000;
    if (gain > 0) network.add_edge(FlowNetwork::kSource, node, gain);
    if (gain < 0) network.add_edge(node, FlowNetwork::kSink, -gain);
    for (uint32_t edge = 0; i > 0 && edge < 1 + random() % 3; ++edge)
      network.add_edge(node, 2 + (i - 1 - random() % std::min(i, 16u)), FlowNetwork::kInfinite);
  }
  return network;
}

// The hard shape for augmenting paths: all of the gain at one end, a small cost at every link.
FlowNetwork chain_closure(uint32_t count) {
  FlowNetwork network;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t node = network.add_node();
    network.add_edge(node, FlowNetwork::kSink, 1);
    if (i > 0) network.add_edge(node, node - 1, FlowNetwork::kInfinite);
  }
  network.add_edge(FlowNetwork::kSource, count + 1, count + 1);
  return network;
}

void min_cut_random(benchmark::State& state) {
  const FlowNetwork network = random_closure(static_cast<uint32_t>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(network.min_cut_source_side());
}
BENCHMARK(min_cut_random)->Arg(10)->Arg(100)->Arg(1'000)->Arg(10'000)->Unit(benchmark::kMicrosecond);

void min_cut_chain(benchmark::State& state) {
  const FlowNetwork network = chain_closure(static_cast<uint32_t>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(network.min_cut_source_side());
}
BENCHMARK(min_cut_chain)->Arg(10)->Arg(100)->Arg(1'000)->Arg(10'000)->Unit(benchmark::kMicrosecond);

constexpr int kChainLength = 100;

std::string chain_of_adds(int length) {
  std::ostringstream text;
  text << "penstock-ir 1\ninput %v0 leaf 0 float32 [n]\n";
  for (int i = 1; i <= length; ++i)
    text << "%v" << i << " = aten::add.Tensor(%v" << i - 1 << ", %v" << i - 1 << ", alpha=1) group " << i
         << " \"add at model.py:" << i << "\"\n";
  text << "output %v" << length << "\n";
  return text.str();
}

void executor_chain_of_adds(benchmark::State& state) {
  at::set_num_threads(1);
  auto graph = penstock::graph::parse_graph(chain_of_adds(kChainLength));
  const auto executor = penstock::runtime::Executor::create(std::move(graph).value(), {});
  const std::array leaves{at::zeros({1})};
  for (auto _ : state) {
    auto outputs = executor.value().run(leaves);
    benchmark::DoNotOptimize(outputs.value().data());
  }
  state.SetItemsProcessed(state.iterations() * kChainLength);
}
BENCHMARK(executor_chain_of_adds)->Unit(benchmark::kMicrosecond);

// The reference: the same calls with no graph, under the same guard.
void direct_chain_of_adds(benchmark::State& state) {
  at::set_num_threads(1);
  const penstock::runtime::ExecutionGuard guard;
  const at::Tensor leaf = at::zeros({1});
  for (auto _ : state) {
    at::Tensor value = leaf;
    for (int i = 0; i < kChainLength; ++i) value = at::add(value, value);
    benchmark::DoNotOptimize(value.unsafeGetTensorImpl());
  }
  state.SetItemsProcessed(state.iterations() * kChainLength);
}
BENCHMARK(direct_chain_of_adds)->Unit(benchmark::kMicrosecond);

void parse_graph_text(benchmark::State& state) {
  const std::string text = chain_of_adds(static_cast<int>(state.range(0)));
  for (auto _ : state) {
    auto graph = penstock::graph::parse_graph(text);
    benchmark::DoNotOptimize(graph.value().nodes.data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text.size()));
}
BENCHMARK(parse_graph_text)->Arg(10)->Arg(1'000)->Unit(benchmark::kMicrosecond);

void print_graph_text(benchmark::State& state) {
  const std::string text = chain_of_adds(static_cast<int>(state.range(0)));
  const auto graph = penstock::graph::parse_graph(text);
  for (auto _ : state) benchmark::DoNotOptimize(penstock::graph::print_graph(graph.value()));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text.size()));
}
BENCHMARK(print_graph_text)->Arg(10)->Arg(1'000)->Unit(benchmark::kMicrosecond);

}  // namespace
