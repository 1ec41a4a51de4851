// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the prefixes that the trainer has shipped on every batch that fits them, and adds their results to the batch as
// boundary tensors. A batch that fits no prefix, or whose prefix fails, travels without: the trainer then runs the
// whole graph on the raw batch, and an error of the model's code appears where the user expects it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/kernel_settings.h"
#include "worker/prefix_runner.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

struct LoadedPrefix {
  std::string text;
  std::vector<std::string> keys;
  PrefixRunner runner;
  uint64_t seed = 0;
  bool is_compiled = false;
  runtime::KernelSettings settings = {};  // that the trainer's results follow from
};

// `message` is the body of a prefix request (PROTOCOL.md). Null when it cannot be read or run here. Where this
// process's kernels are not the trainer's in a family that the prefix needs, it is the part that is exact everywhere.
std::shared_ptr<LoadedPrefix> load_prefix(std::span<const std::byte> message);

// Confined to the thread that serves requests.
class PrefixStage {
 public:
  // One of the same text as another takes its place.
  void install(std::shared_ptr<LoadedPrefix> prefix);
  // Leaves out one that cannot be read or run here.
  void install(std::span<const std::byte> message) {
    if (auto prefix = load_prefix(message)) install(std::move(prefix));
  }
  void clear() { prefixes_.clear(); }

  // Appends boundary tensors and their keys to `content`, which is the batch `sequence` of an epoch that is seeded with
  // `epoch_seed`: random draws of prefixes follow from the two. Returns whether compiled code made some of them.
  bool run(BatchContent& content, uint64_t epoch_seed, uint64_t sequence);

 private:
  std::vector<std::shared_ptr<LoadedPrefix>> prefixes_;  // shared with a caller that installs one again
};

}  // namespace penstock::worker
