// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checks whether workers of different kinds make the same batch of one request. A dataset's computations are user code,
// and their last bits may depend on the CPU and the libraries of the worker. For each pair of kinds, one batch is made
// by a worker of each kind, and a difference is reported.

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/numerics.h"
#include "wire/message.h"

namespace penstock::pool_client {

constexpr size_t kKindPairsMax = 16;  // limit on compared pairs; a worker may report a different kind on each link

// Confined to the I/O thread.
class KindComparison {
 public:
  void note(uint64_t worker_id, const Numerics& numerics) { kinds_[worker_id] = numerics; }
  void forget(uint64_t worker_id) { kinds_.erase(worker_id); }

  // Returns a worker for which `is_open` is true, and whose kind was not compared with the kind of `maker` yet. nullopt
  // while a batch is being compared.
  template <typename IsOpen>
  std::optional<uint64_t> choose(uint64_t maker, const IsOpen& is_open) const {
    const auto own = kinds_.find(maker);
    if (pending_ || own == kinds_.end() || compared_.size() >= kKindPairsMax) return std::nullopt;
    for (const auto& [worker_id, kind] : kinds_) {
      const bool is_other = differing_families(own->second, kind) != 0;
      if (is_other && !compared_.contains(pair_of(own->second, kind)) && is_open(worker_id)) return worker_id;
    }
    return std::nullopt;
  }

  // Call when the batch is requested again, with `key`. `place` describes its first maker, for messages.
  void begin(wire::BatchKey key, uint64_t maker, std::string place, const ContentDigest::Value& content) {
    pending_ = PendingComparison{.key = key, .kind = kinds_.at(maker), .place = std::move(place), .content = content};
  }
  bool awaits(wire::BatchKey key) const { return pending_ && pending_->key == key; }
  // Ends a comparison whose second batch is not available, or cannot be compared.
  void give_up() { pending_.reset(); }
  // Compares the second batch, which arrived from this worker. Returns a message for the user if it differs from the
  // first one.
  std::optional<std::string> finish(uint64_t worker_id, const std::string& place, const ContentDigest::Value& content);

 private:
  using Pair = std::pair<Numerics, Numerics>;
  static Pair pair_of(const Numerics& a, const Numerics& b) { return std::minmax(a, b); }

  struct PendingComparison {
    wire::BatchKey key{};
    Numerics kind{};
    std::string place{};
    ContentDigest::Value content{};
  };

  std::map<uint64_t, Numerics> kinds_;  // of the workers with a link
  std::set<Pair> compared_;
  std::optional<PendingComparison> pending_;
};

}  // namespace penstock::pool_client
