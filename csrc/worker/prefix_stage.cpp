// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_stage.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "capture/capture.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "runtime/compiled_prefix.h"
#include "runtime/kernel_families.h"
#include "runtime/kernel_settings.h"
#include "runtime/numeric_fingerprint.h"
#include "wire/blob_record.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

namespace {

wire::PrefixSettings to_wire(const runtime::KernelSettings& settings) {
  return {.flushes_denormals = settings.flushes_denormals,
          .is_deterministic = settings.is_deterministic,
          .uses_mkldnn = settings.uses_mkldnn,
          .matmul_precision = static_cast<uint8_t>(settings.matmul_precision),
          .convolution_precision = static_cast<uint8_t>(settings.convolution_precision),
          .default_dtype = static_cast<wire::DTypeCode>(settings.default_dtype.toScalarType())};
}

runtime::KernelSettings from_wire(const wire::PrefixSettings& settings) {
  return {.thread_count = 1,
          .flushes_denormals = settings.flushes_denormals,
          .is_deterministic = settings.is_deterministic,
          .uses_mkldnn = settings.uses_mkldnn,
          .matmul_precision = static_cast<at::Float32Precision>(settings.matmul_precision),
          .convolution_precision = static_cast<at::Float32Precision>(settings.convolution_precision),
          .default_dtype = c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(settings.default_dtype))};
}

}  // namespace

Result<std::vector<std::byte>> write_prefix_message(const PrefixMessage& message) {
  wire::PrefixBody body{.text = message.text,
                        .seed = message.seed,
                        .library = message.library,
                        .library_leaves = {},
                        .constants = {},
                        .numerics = message.numerics,
                        .settings = to_wire(message.settings)};
  for (const runtime::LeafLayout& leaf : message.library_leaves) {
    body.library_leaves.push_back({.leaf_index = leaf.leaf_index,
                                   .dtype = static_cast<wire::DTypeCode>(leaf.dtype),
                                   .sizes = leaf.sizes,
                                   .strides = leaf.strides});
  }
  for (const at::Tensor& constant : message.constants) {
    if (!is_plain_tensor(constant)) {
      return Fault{Errc::kMismatch,
                   "a constant of a prefix is not a plain CPU tensor; only plain CPU tensors can be sent to workers"};
    }
    wire::TensorEntry entry = describe_tensor(constant);
    const std::span bytes(static_cast<const std::byte*>(constant.const_data_ptr()), entry.bytes);
    body.constants.push_back({.entry = std::move(entry), .bytes = bytes});
  }
  return wire::write_prefix_body(body);
}

Result<PrefixMessage> read_prefix_message(std::span<const std::byte> message) {
  auto body = wire::parse_prefix_body(message);
  if (!body) return body.error();
  PrefixMessage prefix{.text = std::string(body.value().text),
                       .constants = {},
                       .seed = body.value().seed,
                       .library = std::string(body.value().library),
                       .library_leaves = {},
                       .numerics = body.value().numerics,
                       .settings = from_wire(body.value().settings)};
  for (wire::PrefixLeaf& leaf : body.value().library_leaves) {
    prefix.library_leaves.push_back({.leaf_index = leaf.leaf_index,
                                     .dtype = static_cast<at::ScalarType>(leaf.dtype),
                                     .sizes = std::move(leaf.sizes),
                                     .strides = std::move(leaf.strides)});
  }
  for (const auto& [entry, bytes] : body.value().constants) {
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(entry.dtype));
    at::Tensor constant = at::empty_strided(entry.shape, entry.strides, options);
    if (constant.storage().nbytes() != entry.bytes) {
      return Fault{Errc::kMalformed, "a constant of a prefix has " + std::to_string(entry.bytes) +
                                         " bytes, but torch gives its shape " +
                                         std::to_string(constant.storage().nbytes()) +
                                         "; trainer and workers must run the same version of penstock"};
    }
    if (!bytes.empty()) std::memcpy(constant.mutable_data_ptr(), bytes.data(), bytes.size());
    prefix.constants.push_back(std::move(constant));
  }
  return prefix;
}

namespace {

using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

}  // namespace

Result<Boundary> PrefixRunner::run(std::span<const at::Tensor> leaves, uint64_t seed) {
  using Choice = runtime::CompiledTrial::Choice;
  const bool can_choose = compiled_ && compiled_->accepts(leaves);
  switch (can_choose ? trial_.next() : Choice::kExecutor) {
    case Choice::kBoth: return compare(leaves, seed);
    case Choice::kCompiled: {
      auto made = compiled_->run(leaves);
      if (made) return Boundary{.tensors = std::move(made).value(), .is_compiled = true};
      trial_.refuse();
      break;
    }
    case Choice::kExecutor: break;
  }
  auto made = executor_.run(leaves, seed);
  if (!made) return made.error();
  return Boundary{.tensors = std::move(made).value()};
}

Result<Boundary> PrefixRunner::compare(std::span<const at::Tensor> leaves, uint64_t seed) {
  // The compiled code runs first, so that it does not benefit from finding the batch in the caches.
  auto begin = steady_clock::now();
  auto compiled = compiled_->run(leaves);
  const double compiled_s = seconds_since(begin);
  begin = steady_clock::now();
  auto made = executor_.run(leaves, seed);
  const double executor_s = seconds_since(begin);
  if (!made) return made.error();
  trial_.note(compiled && runtime::is_same_bits(compiled.value(), made.value()), executor_s, compiled_s);
  return Boundary{.tensors = std::move(made).value()};
}

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

void PrefixCache::put(const wire::BlobId& id, std::span<const std::byte> message) {
  Entry& entry = entries_[id];
  entry = {};
  if (!wire::is_shipment(message)) {
    entry.prefix = load_prefix(message);
  } else if (auto shipment = wire::parse_shipment(message)) {
    entry.shipment = std::move(shipment).value();
  }
}

void PrefixCache::select(std::span<const wire::BlobId> ids, PrefixStage& stage) {
  if (!std::equal(ids.begin(), ids.end(), selected_.begin(), selected_.end())) {
    selected_before_ = std::exchange(selected_, {ids.begin(), ids.end()});
    std::erase_if(entries_, [&](const auto& item) {
      const auto is_it = [&](const wire::BlobId& id) { return id == item.first; };
      return std::none_of(selected_.begin(), selected_.end(), is_it) &&
             std::none_of(selected_before_.begin(), selected_before_.end(), is_it);
    });
  }
  stage.clear();
  shipment_ = nullptr;
  for (const wire::BlobId& id : ids) {
    const auto found = entries_.find(id);
    if (found == entries_.end()) continue;
    if (found->second.prefix) stage.install(found->second.prefix);
    if (found->second.shipment) shipment_ = &*found->second.shipment;
  }
}

}  // namespace penstock::worker
