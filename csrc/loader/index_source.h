// SPDX-License-Identifier: Apache-2.0
#pragma once
// The source of the indices of an epoch's batches: torch's samplers (torch_sampler.h), or a user-defined sampler.

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
    uint64_t first_place = 0;           // of the first sample in the epoch's order, from 0
  };
  // Returns the indices of the next batch, or nullopt at the end. A user-defined sampler may throw: the exception
  // propagates from the stream's call that pulled.
  virtual std::optional<Indices> next() = 0;
};

}  // namespace penstock::loader
