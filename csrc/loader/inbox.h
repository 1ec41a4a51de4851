// SPDX-License-Identifier: Apache-2.0
#pragma once
// The answers of workers, on their way from the thread that receives them, or that of the stages, to the trainer's.
// Answers to requests of an epoch that is over are dropped on either side of it.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bounded_queue.h"
#include "base/result.h"
#include "loader/batch.h"
#include "loader/counters.h"

namespace penstock::loader {

// A batch of which some tensors have fewer bytes than they are to have. The stages widen it, or leave that to a device.
struct NarrowArrival {
  std::string place;  // who sent it, in messages
};

struct Arrival {
  enum class Kind : uint8_t {
    kBatch,
    kEnd,     // a shard has no more
    kLost,    // a worker went away
    kGone,    // a worker went away, and others make the batches that it owed
    kGrown,   // there are more workers than before
    kNews,    // `error` says something that the user should read
    kFailed,  // `error` says how the connection between the processes failed
  };
  Kind kind = Kind::kBatch;
  uint32_t worker_id = 0;
  uint32_t epoch = 0;
  uint64_t sequence = 0;
  std::vector<std::byte> state{};  // of kEnd: of the shard's dataset, if it has one
  std::unique_ptr<Batch> batch;
  std::optional<NarrowArrival> narrow{};
  std::optional<Fault> error;
};

// News that wait to be read; what comes after them is dropped, and the last one says so.
inline constexpr size_t kNewsCountMax = 64;

// Batches that were recalled and wait to be taken; more than the trainer has reason to ask for.
inline constexpr size_t kRecalledCountMax = 8;

// Peers decide how much arrives, and the program when it is read, so all that waits here is bounded: batches and ends
// by the requests, news by kNewsCountMax, and that there are more workers is said once. Answers that nobody has room
// for are dropped.
//
// News and growth arrive from the thread that receives alone. The rest may arrive from any, and any may ask is_stale()
// and use the counters. All else is for the trainer's thread.
class Inbox {
 public:
  explicit Inbox(size_t arrival_count_max) : arrivals_(arrival_count_max), states_(arrival_count_max) {}

  void arrive(Arrival arrival);
  void fail(uint32_t worker_id, const Fault& error);
  bool is_stale(uint32_t epoch) const { return epoch < first_epoch_.load() || epoch > last_epoch_.load(); }

  std::optional<Arrival> try_pop();
  // Waits until an arrival is there; true when one is. Blocks.
  bool wait_until(std::chrono::steady_clock::time_point deadline) {
    return !kept_.empty() || arrivals_.wait_until(deadline);
  }
  size_t arrival_count() const { return kept_.size() + arrivals_.size(); }

  // Answers to requests of epochs before `first` or after `last` are dropped from now on, those that have arrived
  // included.
  void set_epochs(uint32_t first, uint32_t last);
  // Drops such answers that were on their way here at that time.
  void drop_stale();

  // Batches that were recalled come beside the others: nothing is to be delivered while the trainer waits for one.
  std::unique_ptr<Batch> try_recalled() {
    auto batch = recalled_.try_pop();
    return batch ? std::move(*batch) : nullptr;
  }
  // The states of datasets that a worker was asked for, as it wrote them. They come beside the batches too: they can be
  // asked for when the epoch is over.
  void arrive_states(std::vector<std::byte> states) { static_cast<void>(states_.try_push(states)); }
  std::optional<std::vector<std::byte>> states_until(std::chrono::steady_clock::time_point deadline) {
    return states_.pop_until(deadline);
  }
  // As wait_until(), for a batch that was recalled.
  bool wait_for_recalled(std::chrono::steady_clock::time_point deadline) { return recalled_.wait_until(deadline); }
  // Whether nothing will come any more, since the connection failed or was ended.
  bool is_dead() const { return is_dead_.load(); }

  // Nothing arrives any more; a thread that waits to hand something over goes on.
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
  std::atomic<size_t> news_count_{0};        // waiting
  std::atomic<bool> is_growth_told_{false};  // and waiting
  BoundedQueue<Arrival> arrivals_;
  std::atomic<bool> is_dead_{false};
  BoundedQueue<std::unique_ptr<Batch>> recalled_{kRecalledCountMax};
  BoundedQueue<std::vector<std::byte>> states_;
  std::deque<Arrival> kept_;  // older than those in the queue; used by the trainer's thread alone
};

}  // namespace penstock::loader
