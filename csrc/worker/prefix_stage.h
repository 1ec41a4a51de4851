// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prefixes in a worker. PrefixStage runs them on every batch that fits them; a PrefixRunner runs one of them, which
// arrived in a PrefixMessage. A pool worker keeps the prefixes that its requests name in a PrefixCache.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "runtime/compiled_prefix.h"
#include "runtime/executor.h"
#include "runtime/kernel_settings.h"
#include "runtime/numeric_fingerprint.h"
#include "wire/blob_record.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// A prefix in transit from the trainer to a worker, with its constants as tensors; wire/blob_record.h defines its
// bytes.
struct PrefixMessage {
  std::string text;
  std::vector<at::Tensor> constants;  // in separately allocated memory
  uint64_t seed = 0;                  // of its random draws, before the batch is mixed in
  // The code compiled from it, if any, and the batch tensors that the code takes.
  std::string library = {};
  std::vector<runtime::LeafLayout> library_leaves = {};
  // The results of the trainer's kernels, and their settings.
  Numerics numerics = runtime::numeric_fingerprint();
  runtime::KernelSettings settings = runtime::KernelSettings::now();
};

// kMismatch when a constant is not a plain CPU tensor.
Result<std::vector<std::byte>> write_prefix_message(const PrefixMessage& message);

Result<PrefixMessage> read_prefix_message(std::span<const std::byte> message);

struct Boundary {
  std::vector<at::Tensor> tensors;
  bool is_compiled = false;  // made entirely by compiled code
};

// One prefix in a worker: the executor, and the compiled library once it has arrived, for as long as both give
// identical bits. Confined to the thread that serves requests.
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

struct LoadedPrefix {
  std::string text;
  std::vector<std::string> keys;
  PrefixRunner runner;
  uint64_t seed = 0;
  bool is_compiled = false;
  runtime::KernelSettings settings = {};  // that determine the trainer's results
};

// `message` is the body of a prefix request (PROTOCOL.md). Null if it cannot be read or run here. If this process's
// kernels differ from the trainer's in a family that the prefix needs, returns only the part that is exact everywhere.
std::shared_ptr<LoadedPrefix> load_prefix(std::span<const std::byte> message);

// Runs the shipped prefixes on every batch that fits them, and adds their results to the batch as boundary tensors. A
// batch that fits no prefix, or whose prefix fails, is sent without: the trainer then runs the whole graph on the raw
// batch, and an error in the model's code appears where the user expects it.
//
// Confined to the thread that serves requests.
class PrefixStage {
 public:
  // Replaces an installed prefix of the same text.
  void install(std::shared_ptr<LoadedPrefix> prefix);
  // Ignores a prefix that cannot be read or run here.
  void install(std::span<const std::byte> message) {
    if (auto prefix = load_prefix(message)) install(std::move(prefix));
  }
  void clear() { prefixes_.clear(); }

  // Appends boundary tensors and their keys to `content`, the batch `sequence` of the epoch seeded with `epoch_seed`:
  // the random draws of prefixes depend on these two. Returns whether compiled code made some of the tensors.
  bool run(BatchContent& content, uint64_t epoch_seed, uint64_t sequence);

 private:
  std::vector<std::shared_ptr<LoadedPrefix>> prefixes_;  // shared with a caller that may reinstall one
};

// The prefixes and the lazy-fetch lists of a pool worker, by the ids of their blobs. Each request names the ones that
// its batch is made with, so a batch is made with the same ones regardless of worker and time. Confined to the thread
// that serves requests.
class PrefixCache {
 public:
  bool has(const wire::BlobId& id) const { return entries_.contains(id); }
  // `message` is the body of a prefix request, or a shipment. If it cannot be used here, that is remembered.
  void put(const wire::BlobId& id, std::span<const std::byte> message);

  // Makes `stage` run the available prefixes among `ids`, and no others. The prefixes of the last two different lists
  // are kept: while a new plan replaces an old one, requests of both alternate.
  void select(std::span<const wire::BlobId> ids, PrefixStage& stage);
  // The shipment among the selected ids, if any. Valid until the next call of select().
  const wire::Shipment* shipment() const { return shipment_; }

 private:
  struct Entry {
    std::shared_ptr<LoadedPrefix> prefix;  // shared with the stage
    std::optional<wire::Shipment> shipment;
  };

  std::map<wire::BlobId, Entry> entries_;
  const wire::Shipment* shipment_ = nullptr;
  std::vector<wire::BlobId> selected_;
  std::vector<wire::BlobId> selected_before_;
};

}  // namespace penstock::worker
