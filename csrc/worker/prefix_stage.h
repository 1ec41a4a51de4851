// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the prefixes that the trainer has shipped on every batch that fits them, and adds what they compute to the batch
// as boundary tensors. A batch that fits no prefix, or whose prefix fails, travels without: the trainer then runs the
// whole graph on the raw batch, and an error of the model's code appears where the user expects it.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "worker/prefix_runner.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// Confined to the thread that serves requests.
class PrefixStage {
 public:
  // `message` is the body of a prefix request (PROTOCOL.md). One that cannot be read or run here is left out, and one
  // of the same text as another takes its place.
  void install(std::span<const std::byte> message);
  void clear() { prefixes_.clear(); }

  // Appends boundary tensors and their keys to `content`, which is the batch `sequence` of an epoch that is seeded with
  // `epoch_seed`: what prefixes draw follows from the two. Returns whether compiled code made some of them.
  bool run(BatchContent& content, uint64_t epoch_seed, uint64_t sequence);

 private:
  struct Prefix {
    std::string text;
    std::vector<std::string> keys;
    PrefixRunner runner;
    uint64_t seed;
  };
  std::vector<Prefix> prefixes_;
};

}  // namespace penstock::worker
