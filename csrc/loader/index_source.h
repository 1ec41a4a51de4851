// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the indices of an epoch's batches come from: torch's own samplers (torch_sampler.h), or a sampler of the
// user's.

#include <cstddef>
#include <optional>
#include <span>

#include "wire/batch_facts.h"

namespace penstock::loader {

// Confined to the trainer's thread.
class IndexSource {
 public:
  IndexSource() = default;
  IndexSource(const IndexSource&) = delete;
  IndexSource& operator=(const IndexSource&) = delete;
  virtual ~IndexSource() = default;

  struct Indices {
    wire::IndexKind kind = wire::IndexKind::kNone;
    std::span<const std::byte> body{};  // valid until the next call
    uint64_t first_place = 0;           // of the first sample in the order of the epoch, from 0
  };
  // The indices of the next batch, or nothing at the end. A sampler of the user's may throw: the exception leaves the
  // call of the stream that pulled.
  virtual std::optional<Indices> next() = 0;
};

}  // namespace penstock::loader
