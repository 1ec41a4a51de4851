// SPDX-License-Identifier: Apache-2.0
#pragma once
// One rank hands the batches that it gets on to other ranks, its *followers*, which are to have the same ones: those of
// one model-parallel group. So a pool makes each of these batches once, and sends it once.
//
//   pool ─▶ leader's client ─ arrival tap ─▶ replica store ─▶ a pool server for each follower ─▶ the follower's client
//
// To a follower its leader is a worker of a pool, the only one: it sends the requests that it would send to a pool, and
// links, losses and slabs of shared memory are those of a worker of its own machine (worker/pool_server.h), or of
// another one. A request is answered with the leader's batch if the leader has asked for the very same.

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
  std::string name;           // for people, such as "rank 3"
  net::PublicKey key;         // that it shows
  std::string handover = {};  // as PoolServerOptions::handover; empty for a follower on another machine
};

struct RelayOptions {
  std::string leader;           // for people, such as "rank 0"
  net::KeyPair keys;            // the leader's, by which followers know it
  std::string bind_host;        // where followers reach it
  uint64_t arena_bytes = 0;     // of shared memory for each follower
  uint64_t held_bytes_max = 0;  // of batches that wait for a follower
  std::vector<FollowerSeat> followers;
};

// start(), close() and the destructor are for the owner's thread; asked() for the trainer's; arrived() for that of the
// stages; the rest for any.
class Relay final : public loader::ArrivalTap {
 public:
  // Listens for each follower. kNoMemory where the system has no thread left.
  static Result<std::shared_ptr<Relay>> start(RelayOptions options);

  // For `start`.
  explicit Relay(RelayOptions options);
  ~Relay() override { close(); }

  // Ends the servers, and the threads. Followers see their worker die.
  void close();

  // Where a follower finds its worker, in the order of the followers.
  struct Address {
    uint64_t worker_id = 0;
    std::string endpoint;
    std::string handover;
  };
  const std::vector<Address>& addresses() const { return addresses_; }

  void asked(const cluster::RequestContent& content) override;
  void arrived(loader::Arrival& arrival) override;
  void source_stopped() override;
  std::optional<Fault> failure() const override { return failure_.get(); }

  // The follower that takes no batches, for which the leader has waited for so long; none if it waits for none.
  std::optional<std::pair<std::string, Duration>> awaited_follower() const;
  // Batches that were handed on, to all followers together.
  uint64_t handed_count() const { return handed_count_.load(); }

 private:
  struct Follower {
    std::unique_ptr<worker::PoolServer> server;
    std::thread thread;
  };

  // The ring of the server of one follower.
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

  // A client numbers its epochs from its own beginning. These go on.
  Mutex mutex_;
  std::map<uint32_t, uint32_t> epoch_of_ PENSTOCK_GUARDED_BY(mutex_);  // by the number of the client in use
  uint32_t epoch_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

}  // namespace penstock::replica
