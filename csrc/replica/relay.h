// SPDX-License-Identifier: Apache-2.0
#pragma once
// One rank, the *leader*, passes the batches that it receives on to other ranks, its *followers*, which need the same
// batches: the ranks of one model-parallel group. So a pool makes and sends each of these batches only once. Relay is
// the leader's side; ReplicaStore keeps the batches for the followers.
//
//   pool ─▶ leader's client ─ arrival tap ─▶ replica store ─▶ a pool server for each follower ─▶ the follower's client
//
// For a follower, its leader is the only worker of a pool: it sends the leader the requests that it would send to a
// pool, and links, losses and shared-memory slabs are the same as with a pool worker on its machine
// (worker/batch_server.h) or on another one. A request is answered with the leader's batch if the leader has made the
// identical request.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/result.h"
#include "loader/inbox.h"
#include "net/keys.h"
#include "replica/leaf_division.h"
#include "worker/batch_server.h"

namespace penstock::replica {

// How long a follower's request waits for the same request of the leader, once the leader has made other ones.
constexpr Duration kPatience = std::chrono::seconds(10);

struct RequestDigest {
  uint64_t sequence = 0;  // the place in the epoch
  ContentDigest::Value value{};

  friend bool operator==(const RequestDigest&, const RequestDigest&) = default;
};

// The leader's answer to one request: a batch, the end of the epoch or an error.
struct ReplicaAnswer {
  enum class Kind : uint8_t { kBatch, kEnd, kError };
  Kind kind = Kind::kBatch;
  // Of a batch: read-only copies, with meta tensors in the place of leaves that no follower reads.
  std::vector<at::Tensor> tensors{};
  std::vector<std::vector<uint32_t>> absent{};  // for each follower, the leaves that it does not read; or empty
  std::vector<std::byte> nest{};
  std::vector<std::byte> state{};  // of the dataset, after the batch
  uint8_t flags = 0;               // wire::kBatchFlags
  std::string type_name{};         // of an error
  std::string text{};

  uint64_t bytes() const;
};

// Keeps the batches of one rank until every follower has taken them.
//
// A batch is identified by its place in the epoch and by all of its inputs (RequestDigest): each rank counts epochs
// separately, and two epochs of one loader differ in their seeds. A follower that requests a batch before its leader
// has requested it waits. The request is refused, with the reason, once the leader has requested another batch in that
// place or has started another epoch.
//
// Thread-safe.
class ReplicaStore {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Limits the untaken batches of each follower to `bytes_max` bytes. A single larger batch is allowed, and there is no
  // limit while the follower waits for a missing batch.
  ReplicaStore(size_t follower_count, uint64_t bytes_max);

  // ---- For the leader

  void asked(uint32_t epoch, const RequestDigest& request);
  // Blocks while a follower has too many untaken batches.
  void arrived(uint32_t epoch, uint64_t sequence, std::shared_ptr<const ReplicaAnswer> answer);
  // Ends all waits; later calls do not wait either, until the leader's next request.
  void stop();
  // The follower for which arrived() is waiting, and for how long; none while it does not wait.
  std::optional<std::pair<size_t, Duration>> awaited_follower() const;

  // ---- For a follower

  struct Taken {
    std::shared_ptr<const ReplicaAnswer> answer{};  // null if there is none yet
    std::string refusal{};                          // why there will be none; otherwise empty
  };
  // Returns the answer to a request that the follower made at `requested_at`. Blocks until it is available or the
  // deadline has passed.
  Taken take(size_t follower, const RequestDigest& request, Instant requested_at, Deadline deadline);

 private:
  using Key = std::pair<uint32_t, uint64_t>;  // the leader's epoch, place in it
  struct Entry {
    ContentDigest::Value digest{};
    std::shared_ptr<const ReplicaAnswer> answer{};
    std::vector<bool> taken_by{};
  };
  struct Follower {
    bool is_waiting = false;     // for a missing batch
    uint64_t untaken_bytes = 0;  // of the answers that it can take now
  };

  std::map<Key, Entry>::iterator find(const RequestDigest& request) PENSTOCK_REQUIRES(mutex_);
  void take_from(std::map<Key, Entry>::iterator entry, size_t follower) PENSTOCK_REQUIRES(mutex_);
  void pass_by(uint32_t epoch, size_t follower) PENSTOCK_REQUIRES(mutex_);
  // Returns why the request cannot be answered any more; empty while it still may be.
  std::string refusal_of(const RequestDigest& request, Instant requested_at, Instant now) const
      PENSTOCK_REQUIRES(mutex_);
  std::optional<size_t> slow_follower(uint64_t more_bytes) const PENSTOCK_REQUIRES(mutex_);

  const uint64_t bytes_max_;
  mutable Mutex mutex_;
  Condition changed_;
  std::map<Key, Entry> entries_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<Follower> followers_ PENSTOCK_GUARDED_BY(mutex_);
  uint32_t epoch_ PENSTOCK_GUARDED_BY(mutex_) = 0;      // the leader's latest epoch
  Instant requested_at_ PENSTOCK_GUARDED_BY(mutex_){};  // when the leader made its latest request
  bool is_stopped_ PENSTOCK_GUARDED_BY(mutex_) = false;
  std::optional<size_t> awaited_ PENSTOCK_GUARDED_BY(mutex_);
  Instant awaited_since_ PENSTOCK_GUARDED_BY(mutex_){};
};

struct FollowerSeat {
  std::string name;           // for messages, such as "rank 3"
  net::PublicKey key;         // identifies the follower
  std::string handover = {};  // as PoolServerOptions::handover; empty for a follower on another machine
};

struct RelayOptions {
  std::string leader;           // for messages, such as "rank 0"
  net::KeyPair keys;            // identify the leader to the followers
  std::string bind_host;        // where followers reach it
  uint64_t arena_bytes = 0;     // shared memory per follower
  uint64_t held_bytes_max = 0;  // of batches that wait for a follower
  std::vector<FollowerSeat> followers;
  std::vector<LeafReaders> leaves = {};  // empty: every rank has all leaves
};

// If leaves are divided among the ranks, a follower gets the leaves that it reads, and the leader's batch loses those
// that its own program does not read. Without followers, a relay only does the latter.
//
// start(), close() and the destructor are for the owner's thread; asked() for the trainer's thread; arrived() for the
// stages' thread; the rest for any thread.
class Relay final : public loader::ArrivalTap {
 public:
  // Listens for each follower. Returns kNoMemory if the system cannot start another thread.
  static Result<std::shared_ptr<Relay>> start(RelayOptions options);

  // For `start`.
  explicit Relay(RelayOptions options);
  ~Relay() override { close(); }

  // Stops the servers and the threads. To followers, their worker dies.
  void close();

  // Where each follower finds its worker, in the order of the followers.
  struct Address {
    uint64_t worker_id = 0;
    std::string endpoint;
    std::string handover;
  };
  const std::vector<Address>& addresses() const { return addresses_; }

  void asked(const session::RequestContent& content) override;
  void arrived(loader::Arrival& arrival) override;
  void source_stopped() override;
  std::optional<Fault> failure() const override { return failure_.get(); }

  // The follower that takes no batches and how long the leader has waited for it; none if the leader is not waiting.
  std::optional<std::pair<std::string, Duration>> awaited_follower() const;
  // The number of batches passed on, over all followers.
  uint64_t handed_count() const { return handed_count_.load(); }

 private:
  struct Follower {
    std::unique_ptr<worker::PoolServer> server;
    std::thread thread;
  };

  // Returns the key ring for the server of one follower.
  Result<net::KeyRing> key_ring(const FollowerSeat& seat) const;
  Result<void> open_follower(const FollowerSeat& seat);
  void run(size_t follower);
  void serve(size_t follower);
  void fail(size_t follower, const std::string& what);
  void answer(size_t follower, const server::PoolWork& work);
  // Divides the leaves of the leader's batch: returns the followers' copy, and leaves the others out of its own. A
  // batch that cannot be divided becomes an error on all ranks.
  std::shared_ptr<const ReplicaAnswer> divide(std::unique_ptr<loader::Batch>& batch) const;

  const RelayOptions options_;
  ReplicaStore store_;
  std::atomic<bool> is_closing_{false};
  std::atomic<uint64_t> handed_count_{0};
  Board<std::optional<Fault>> failure_;  // of a thread
  std::vector<Follower> followers_;
  std::vector<Address> addresses_;

  // Each client numbers its epochs from its own start. This numbering continues across clients.
  Mutex mutex_;
  std::map<uint32_t, uint32_t> epoch_of_ PENSTOCK_GUARDED_BY(mutex_);  // key: the epoch number of the current client
  uint32_t epoch_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

}  // namespace penstock::replica
