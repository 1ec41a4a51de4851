// SPDX-License-Identifier: Apache-2.0
#pragma once
// The breakdown of a trainer's step time. A step is the time from one batch to the next; each moment of it has exactly
// one category: the program computes, it waits for a batch, it waits for other ranks, or the loader itself works. A
// wait is attributed to the stages in which the batch that ended it was at the time:
//
//     requested ─ a free worker ─ started ─ dataset ─ collate ─ prefix ─ made ─ wire ─ arrived ─ device copy ─ staged
//
// From the moment at which a later batch is available, the wait is attributed to the order instead: with in_order=False
// it would be over.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "loader/counters.h"
#include "wire/reports.h"

namespace penstock::loader {

// Limits on the recorded workers and samples; a pool's workers change.
inline constexpr size_t kLedgerWorkerCountMax = 1024;
inline constexpr size_t kSlowSampleCountMax = 8;

// Totals of one worker, for the delivered batches that it made.
struct WorkerTotals {
  uint64_t batch_count = 0;
  MakingTimes making{};
  Duration on_wire{0};
  Duration waited{0};  // by the trainer, for its batches
};

// One of the slowest samples; or all samples of a batch, if they were not timed individually.
struct SlowSample {
  Duration time{0};
  uint32_t epoch = 0;
  uint64_t sequence = 0;            // of its batch
  std::optional<uint32_t> place{};  // in its batch; nullopt for the whole batch
  std::optional<int64_t> index{};   // of the dataset, if its place is known and the batch was requested by numbers
  uint64_t worker_id = 0;
};

// A delivered batch, for a trace.
struct StepRecord {
  uint32_t epoch = 0;
  uint64_t sequence = 0;
  BatchTimes times{};
  MakingTimes making{};
  Instant entered_at{};  // the program requested its next batch
  Instant given_at{};    // it received this one
  uint64_t bytes = 0;
};

// workers(), slow_samples() and take_records() are for any thread; the rest is confined to the trainer's.
class StepLedger {
 public:
  explicit StepLedger(LoaderCounters& counters) : counters_(counters) {}

  // Another loader starts to use the client: the records of workers and samples are cleared.
  void begin_stream();
  // An epoch starts: the time until the first enter() is the program's.
  void begin_epoch(Instant now);
  // The program requests its next batch, and receives it. Steps may be left without a batch, at an epoch's end.
  void enter(Instant now);
  void leave(Instant now);
  bool is_in_step() const { return entered_at_.has_value(); }

  // The trainer's thread waited for the next event.
  void note_wait(Instant begin, Instant end);
  bool has_waits() const { return !waits_.empty(); }
  // A wait until other ranks have a batch for the same step; the time outside waits for a batch is counted separately.
  void begin_ranks(Instant now);
  void end_ranks(Instant now);

  struct Delivery {
    uint32_t epoch = 0;
    uint64_t sequence = 0;
    BatchTimes times{};
    MakingTimes making{};
    uint64_t bytes = 0;
    std::optional<Instant> later_ready_at{};  // the first moment at which a later batch was available
  };
  // Attributes the waits since the last delivery to this batch.
  void deliver(const Delivery& said);
  void note_slow_sample(const SlowSample& sample);
  // Whether a sample is among the slowest.
  bool is_slow(Duration time) const;

  static wire::StepTotals totals(const LoaderCounters& counters);
  std::map<uint64_t, WorkerTotals> workers() const;
  std::vector<SlowSample> slow_samples() const;  // the slowest first

  // Records the next `count_max` delivered batches.
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
  // Returns how much of the waits was attributed.
  Duration share_out(const Delivery& delivery);
  void add(Place place, Duration time);

  LoaderCounters& counters_;
  std::optional<Instant> left_at_{};     // the program has been computing since then
  std::optional<Instant> entered_at_{};  // the program has been in the loader since then
  std::vector<Window> waits_{};          // not attributed to a batch yet
  Duration waited_{0};                   // in this call
  Duration shared_{0};                   // the part of this call's time that is attributed
  bool has_batch_ = false;
  std::optional<Window> ranks_{};  // `end` is unused; waited_ at that time
  Duration waited_before_ranks_{0};

  mutable Mutex mutex_;
  std::map<uint64_t, WorkerTotals> workers_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<SlowSample> slow_samples_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<StepRecord> records_ PENSTOCK_GUARDED_BY(mutex_);
  size_t record_count_max_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

}  // namespace penstock::loader
