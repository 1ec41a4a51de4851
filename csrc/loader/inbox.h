// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the workers' answers reach the trainer's thread. Inbox is the queue to it from the receiving thread, or from the
// stage thread; answers to requests of a finished epoch are dropped at both ends. An ArrivalTap sees requests and
// arrivals before the trainer does.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "loader/batch.h"
#include "loader/counters.h"
#include "session/request_order.h"

namespace penstock::loader {

// A batch with narrow tensors. The stages widen it, or have a device do that.
struct NarrowArrival {
  std::string place;  // the sender, for messages
};

struct Arrival {
  enum class Kind : uint8_t {
    kBatch,
    kEnd,     // a shard is exhausted
    kLost,    // a worker is lost
    kGone,    // a worker is lost, and others make its outstanding batches
    kGrown,   // the number of workers has increased
    kNews,    // `error` contains a message for the user
    kFailed,  // `error` describes how the connection between the processes failed
  };
  Kind kind = Kind::kBatch;
  uint32_t worker_id = 0;
  uint32_t epoch = 0;
  uint64_t sequence = 0;
  std::vector<std::byte> state{};  // of kEnd: the state of the shard's dataset, if it has one
  std::unique_ptr<Batch> batch;
  std::optional<NarrowArrival> narrow{};
  std::optional<Fault> error;
};

// Limit on unread news; further news is dropped, and the last message reports that.
inline constexpr size_t kNewsCountMax = 64;

// Limit on recalled batches that wait to be taken; a trainer has no reason to request more.
inline constexpr size_t kRecalledCountMax = 8;

// Peers determine how much arrives, and the program when it is read, so every queue here is bounded: batches and ends
// by the number of requests, news by kNewsCountMax, and growth is reported only once until read. Answers that do not
// fit are dropped.
//
// News and growth may arrive only from the receiving thread, other arrivals from any thread. Any thread may call
// is_stale() and use the counters. All other calls are for the trainer's thread.
class Inbox {
 public:
  explicit Inbox(size_t arrival_count_max) : arrivals_(arrival_count_max), states_(arrival_count_max) {}

  void arrive(Arrival arrival);
  void fail(uint32_t worker_id, const Fault& error);
  bool is_stale(uint32_t epoch) const { return epoch < first_epoch_.load() || epoch > last_epoch_.load(); }

  std::optional<Arrival> try_pop();
  // Waits until an arrival is available; returns whether one is. Blocks.
  bool wait_until(std::chrono::steady_clock::time_point deadline) {
    return !kept_.empty() || arrivals_.wait_until(deadline);
  }
  size_t arrival_count() const { return kept_.size() + arrivals_.size(); }

  // From now on, answers to requests of epochs before `first` or after `last` are dropped, including answers that have
  // arrived.
  void set_epochs(uint32_t first, uint32_t last);
  // Drops such answers that were in flight at that time.
  void drop_stale();

  // Recalled batches have a separate queue: no other batch may be delivered while the trainer waits for one.
  std::unique_ptr<Batch> try_recalled() {
    auto batch = recalled_.try_pop();
    return batch ? std::move(*batch) : nullptr;
  }
  // Dataset states that a worker was asked for, in the worker's format. They have a separate queue, too: they can be
  // requested after the epoch has ended.
  void arrive_states(std::vector<std::byte> states) { static_cast<void>(states_.try_push(states)); }
  std::optional<std::vector<std::byte>> states_until(std::chrono::steady_clock::time_point deadline) {
    return states_.pop_until(deadline);
  }
  // wait_until() for a recalled batch.
  bool wait_for_recalled(std::chrono::steady_clock::time_point deadline) { return recalled_.wait_until(deadline); }
  // Whether no more arrivals can follow, because the connection failed or was closed.
  bool is_dead() const { return is_dead_.load(); }

  // Ends all arrivals; a thread that is blocked while handing an arrival over continues.
  void close() {
    is_dead_.store(true);
    arrivals_.close();
    recalled_.close();
    states_.close();
  }
  void clear();

  loader::LoaderCounters& counters() { return counters_; }

 private:
  std::optional<Arrival> try_take();

  std::atomic<uint32_t> first_epoch_{0};
  std::atomic<uint32_t> last_epoch_{0};
  loader::LoaderCounters counters_;
  std::atomic<size_t> news_count_{0};          // of unread news
  std::atomic<bool> is_growth_queued_{false};  // an unread kGrown is queued
  BoundedQueue<Arrival> arrivals_;
  std::atomic<bool> is_dead_{false};
  BoundedQueue<std::unique_ptr<Batch>> recalled_{kRecalledCountMax};
  BoundedQueue<std::vector<std::byte>> states_;
  std::deque<Arrival> kept_;  // older than the queued ones; confined to the trainer's thread
};

// An observer of a source: it sees what is requested and what arrives, before the trainer does. The relay that forwards
// batches to other ranks is one (replica/relay.h).
class ArrivalTap {
 public:
  ArrivalTap() = default;
  ArrivalTap(const ArrivalTap&) = delete;
  ArrivalTap& operator=(const ArrivalTap&) = delete;
  virtual ~ArrivalTap() = default;

  // A batch is requested. Called on the trainer's thread.
  virtual void asked(const session::RequestContent& content) = 0;
  // A batch has arrived, or the end of a shard in its place. Called on the stage thread, which waits until this
  // returns.
  virtual void arrived(Arrival& arrival) = 0;
  // No more arrivals follow: a blocked arrived() must return. Called on the owner's thread.
  virtual void source_stopped() = 0;
  // The reason of its failure, if it has failed: the trainer's next call reports it. Called on any thread.
  virtual std::optional<Fault> failure() const = 0;
};

}  // namespace penstock::loader
