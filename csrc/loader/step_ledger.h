// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the time of a trainer's steps goes. A step is from one batch to the next; each moment of it is in exactly one
// place: the program computes, it waits for a batch, it waits for other ranks, or the loader itself works. While it
// waits, the batch that ends the wait says what for, by when it was where:
//
//     asked ─ a free worker ─ begun ─ dataset ─ collate ─ prefix ─ made ─ wire ─ arrived ─ device copy ─ staged
//
// From when a later batch is here, the wait is for the order instead: with in_order=False it would be over.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/instant.h"
#include "base/mutex.h"
#include "loader/batch_times.h"
#include "loader/counters.h"
#include "wire/reports.h"

namespace penstock::loader {

// Workers and samples that are remembered; a pool's workers come and go.
inline constexpr size_t kLedgerWorkerCountMax = 1024;
inline constexpr size_t kSlowSampleCountMax = 8;

// Of one worker: the batches delivered that it made.
struct WorkerTotals {
  uint64_t batch_count = 0;
  MakingTimes making{};
  Duration on_wire{0};
  Duration waited{0};  // by the trainer, for its batches
};

// One of the samples that took their worker longest; or all samples of a batch, where they were not timed one by one.
struct SlowSample {
  Duration time{0};
  uint32_t epoch = 0;
  uint64_t sequence = 0;            // of its batch
  std::optional<uint32_t> place{};  // in its batch; nothing for all of it
  std::optional<int64_t> index{};   // of the dataset, where its place is known and the batch was asked for by numbers
  uint64_t worker_id = 0;
};

// A delivered batch, for a trace.
struct StepRecord {
  uint32_t epoch = 0;
  uint64_t sequence = 0;
  BatchTimes times{};
  MakingTimes making{};
  Instant entered_at{};  // the program asked for its next batch
  Instant given_at{};    // it was given this one
  uint64_t bytes = 0;
};

// workers(), slow_samples() and take_records() are for any thread; the rest is confined to the trainer's.
class StepLedger {
 public:
  explicit StepLedger(LoaderCounters& counters) : counters_(counters) {}

  // Another loader begins to use the client: what is told of workers and samples begins anew.
  void begin_stream();
  // An epoch begins: the time until the first enter() is the program's.
  void begin_epoch(Instant now);
  // The program asks for its next batch, and has it. Steps may be left without one, at an epoch's end.
  void enter(Instant now);
  void leave(Instant now);
  bool is_in_step() const { return entered_at_.has_value(); }

  // The trainer's thread waited for what comes next.
  void note_wait(Instant begin, Instant end);
  bool has_waits() const { return !waits_.empty(); }
  // Waiting for other ranks to have a batch for the same step, which counts apart where it is no wait for a batch.
  void begin_ranks(Instant now);
  void end_ranks(Instant now);

  struct Delivery {
    uint32_t epoch = 0;
    uint64_t sequence = 0;
    BatchTimes times{};
    MakingTimes making{};
    uint64_t bytes = 0;
    std::optional<Instant> later_ready_at{};  // the first moment at which a later batch was here
  };
  // This batch is what the waits since the last one were for.
  void deliver(const Delivery& said);
  void note_slow_sample(const SlowSample& sample);
  // Whether a sample is among those that took longest.
  bool is_slow(Duration time) const;

  static wire::StepTotals totals(const LoaderCounters& counters);
  std::map<uint64_t, WorkerTotals> workers() const;
  std::vector<SlowSample> slow_samples() const;  // the slowest first

  // Keeps what is told of the next batches, `count_max` of them.
  void record(size_t count_max);
  std::vector<StepRecord> take_records();

 private:
  struct Window {
    Instant begin{};
    Instant end{};
  };
  enum Place : size_t { kWorker, kDataset, kCollate, kPrefix, kWire, kDevice, kOrder, kPlaceCount };
  static_assert(kPlaceCount == kWaitPlaceCount);

  static Delivery bounded(Delivery delivery);
  // Returns how much of the waits is in its place then.
  Duration share_out(const Delivery& delivery);
  void add(Place place, Duration time);

  LoaderCounters& counters_;
  std::optional<Instant> left_at_{};     // since then the program computes
  std::optional<Instant> entered_at_{};  // since then it is in the loader
  std::vector<Window> waits_{};          // that no batch has explained yet
  Duration waited_{0};                   // in this call
  Duration shared_{0};                   // of it, what is in its place
  bool has_batch_ = false;
  std::optional<Window> ranks_{};  // `end` is unused; waited_ then
  Duration waited_before_ranks_{0};

  mutable Mutex mutex_;
  std::map<uint64_t, WorkerTotals> workers_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<SlowSample> slow_samples_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<StepRecord> records_ PENSTOCK_GUARDED_BY(mutex_);
  size_t record_count_max_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

}  // namespace penstock::loader
