// SPDX-License-Identifier: Apache-2.0
#pragma once
// The batches of one rank, kept until every follower has taken them.
//
// A batch is known by its place in the epoch and by all that it is made from (RequestDigest): ranks count epochs each
// for itself, and two epochs of one loader are told apart by their seeds. A follower that asks for a batch which its
// leader has not asked for yet waits. It waits in vain, and is told why, once the leader has asked for another batch in
// that place, or has begun another epoch.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/content_digest.h"
#include "base/instant.h"
#include "base/mutex.h"

namespace penstock::replica {

// What a leader may be late with to ask for, after it was seen to be elsewhere.
constexpr Duration kPatience = std::chrono::seconds(10);

struct RequestDigest {
  uint64_t sequence = 0;  // the place in the epoch
  ContentDigest::Value value{};

  friend bool operator==(const RequestDigest&, const RequestDigest&) = default;
};

// What a leader has in the place of a batch.
struct ReplicaAnswer {
  enum class Kind : uint8_t { kBatch, kEnd, kError };
  Kind kind = Kind::kBatch;
  std::vector<at::Tensor> tensors{};  // of a batch; copies that nobody writes to
  std::vector<std::byte> nest{};
  std::vector<std::byte> state{};  // of the dataset, after the batch
  uint8_t flags = 0;               // wire::kBatchFlags
  std::string type_name{};         // of an error
  std::string text{};

  uint64_t bytes() const;
};

// Thread-safe.
class ReplicaStore {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // At most `bytes_max` of batches wait for a follower that has room for one of them.
  ReplicaStore(size_t follower_count, uint64_t bytes_max);

  // ---- For the leader

  void asked(uint32_t epoch, const RequestDigest& request);
  // Waits while the batches that followers could take are more than they may be. Blocks.
  void arrived(uint32_t epoch, uint64_t sequence, std::shared_ptr<const ReplicaAnswer> answer);
  // Nobody waits any more, until the leader asks for the next batch.
  void stop();
  // The follower for which arrived() has waited for so long; none while it does not wait.
  std::optional<std::pair<size_t, Duration>> awaited_follower() const;

  // ---- For a follower

  struct Taken {
    std::shared_ptr<const ReplicaAnswer> answer{};  // null where there is none yet
    std::string refusal{};                          // why there will be none; empty otherwise
  };
  // The answer to a request that the follower has made at `requested_at`. Waits for it until the deadline. Blocks.
  Taken take(size_t follower, const RequestDigest& request, Instant requested_at, Deadline deadline);

 private:
  using Key = std::pair<uint32_t, uint64_t>;  // epoch of the leader, place in it
  struct Entry {
    ContentDigest::Value digest{};
    std::shared_ptr<const ReplicaAnswer> answer{};
    std::vector<bool> taken_by{};
  };
  struct Follower {
    bool is_waiting = false;     // for something that is not here
    uint64_t untaken_bytes = 0;  // of what it could take
  };

  std::map<Key, Entry>::iterator find(const RequestDigest& request) PENSTOCK_REQUIRES(mutex_);
  void take_from(std::map<Key, Entry>::iterator entry, size_t follower) PENSTOCK_REQUIRES(mutex_);
  void pass_by(uint32_t epoch, size_t follower) PENSTOCK_REQUIRES(mutex_);
  // Why the follower waits in vain; empty as long as it may not.
  std::string refusal_of(const RequestDigest& request, Instant requested_at, Instant now) const
      PENSTOCK_REQUIRES(mutex_);
  std::optional<size_t> slow_follower(uint64_t more_bytes) const PENSTOCK_REQUIRES(mutex_);

  const uint64_t bytes_max_;
  mutable Mutex mutex_;
  Condition changed_;
  std::map<Key, Entry> entries_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<Follower> followers_ PENSTOCK_GUARDED_BY(mutex_);
  uint32_t epoch_ PENSTOCK_GUARDED_BY(mutex_) = 0;  // the leader's last one
  Instant asked_at_ PENSTOCK_GUARDED_BY(mutex_){};  // the last time
  bool is_stopped_ PENSTOCK_GUARDED_BY(mutex_) = false;
  std::optional<size_t> awaited_ PENSTOCK_GUARDED_BY(mutex_);
  Instant awaited_since_ PENSTOCK_GUARDED_BY(mutex_){};
};

}  // namespace penstock::replica
