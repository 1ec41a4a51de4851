// SPDX-License-Identifier: Apache-2.0
#pragma once
// One rank passes the batches that it receives on to other ranks, its *followers*, which need the same batches: the
// ranks of one model-parallel group. So a pool makes and sends each of these batches only once.
//
//   pool ─▶ leader's client ─ arrival tap ─▶ replica store ─▶ a pool server for each follower ─▶ the follower's client
//
// For a follower, its leader is the only worker of a pool: it sends the leader the requests that it would send to a
// pool, and links, losses and shared-memory slabs are the same as with a pool worker on its machine
// (worker/pool_server.h) or on another one. A request is answered with the leader's batch if the leader has made the
// identical request.

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/board.h"
#include "base/result.h"
#include "loader/arrival_tap.h"
#include "net/key_ring.h"
#include "replica/replica_store.h"
#include "worker/pool_server.h"

namespace penstock::replica {

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
};

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
