// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the shipped prefixes on every batch that fits them, and adds their results to the batch as boundary tensors. A
// batch that fits no prefix, or whose prefix fails, is sent without: the trainer then runs the whole graph on the raw
// batch, and an error in the model's code appears where the user expects it.

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
  runtime::KernelSettings settings = {};  // that determine the trainer's results
};

// `message` is the body of a prefix request (PROTOCOL.md). Null if it cannot be read or run here. If this process's
// kernels differ from the trainer's in a family that the prefix needs, returns only the part that is exact everywhere.
std::shared_ptr<LoadedPrefix> load_prefix(std::span<const std::byte> message);

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

}  // namespace penstock::worker
