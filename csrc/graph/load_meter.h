// SPDX-License-Identifier: Apache-2.0
#pragma once
// The costs of a batch in the trainer and in a worker, measured while a loader runs. Pure: clocks and counters are the
// caller's.
//
// A step is from one delivery to the next: the trainer is at work on the batch, then waits for the other one. A worker
// says for each batch how long it took, and how much of that went into boundary tensors. Means leave out the longest
// and the shortest tenth, so that neither a pause of the program nor one of the machine counts.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "graph/price.h"

namespace penstock::graph {

// The counters of a loader's stream so far; seconds are those of its workers.
struct DeliveredWork {
  uint64_t batches = 0;
  uint64_t with_boundary = 0;  // of these
  double fetch_s = 0;          // at work on batches, boundary tensors included
  double prefix_s = 0;         // of that, on boundary tensors
  uint64_t bytes = 0;          // of the batches
  uint32_t workers = 0;        // that there are now, where they come and go; 0: those that the epoch began with
  LinkRate link{};             // to workers elsewhere, as it is now
};

// Means over some steps; seconds of a batch.
struct MeasuredLoads {
  size_t steps = 0;
  uint32_t workers = 1;
  uint32_t cpus = 1;        // that the trainer and the workers may use together
  double trainer_s = 0;     // the trainer at work on it
  double fetch_s = 0;       // a worker at work on it, boundary tensors included
  double prefix_s = 0;      // of that, on boundary tensors
  double bytes = 0;         // of it, as it came
  LinkRate link{};          // that it came over
  double step_s = 0;        // from delivery to delivery
  double step_error_s = 0;  // the standard error of that

  // One line for a log.
  std::string text() const;
  friend bool operator==(const MeasuredLoads&, const MeasuredLoads&) = default;
};

struct MiddleMean {
  double mean = 0;
  double error = 0;  // its standard error; infinite for one value
};

// The mean of `values` but for the lowest and the highest tenth. There is at least one.
MiddleMean middle_mean(std::vector<double> values);

// Notes the steps of a loader's newest iterator. Thread-compatible.
class LoadMeter {
 public:
  // More steps than these are not kept: the oldest is forgotten.
  static constexpr size_t kStepsMax = 512;

  // An epoch begins with this number of workers. The time between two epochs is no step. Up to `in_flight_max` batches
  // may be under way at any time.
  void begin(uint32_t workers, uint32_t in_flight_max);
  // A batch was delivered, for a call of next() that lasted from then until then.
  void note(double called_at_s, double returned_at_s, const DeliveredWork& work);
  // The program waited for batches to look at them ahead.
  void note_waiting(double seconds) { ahead_s_ += seconds; }
  // The trainer's device was at work on a batch for so long.
  void note_device(double seconds);
  // This step is not like the others: something was planned or compared in it.
  void skip() { is_odd_ = true; }
  // A plan has changed, or something that was done now and then is not done any more. Batches that are under way are
  // not measured either.
  void forget();
  // Begins to measure anew, with the very next step.
  void clear();

  size_t step_count() const { return steps_.size(); }
  // Whether at least `steps` are noted, of at least `seconds` together; or as many as are kept.
  bool has_seen(size_t steps, double seconds) const;
  // The means over the steps since forget(), of those with boundary tensors alone where the plan has some; none where
  // these are under half. `cpus` is for the result.
  std::optional<MeasuredLoads> measured(bool needs_boundary, uint32_t cpus) const;

 private:
  // The work of a worker on one batch.
  struct BatchWork {
    double fetch_s = 0;
    double prefix_s = 0;
    double bytes = 0;
    bool has_boundary = false;
  };
  // One batch, from its delivery to that of the next.
  struct Step {
    double work_s = 0;
    double wait_s = 0;
    BatchWork batch;
  };

  std::deque<Step> steps_;
  std::deque<double> device_seconds_;
  uint32_t workers_ = 1;
  uint32_t in_flight_max_ = 0;  // batches that may have been asked for before a plan changed
  uint32_t settling_ = 0;       // steps that are still to be left out
  double seen_s_ = 0;
  // These are about the newest delivery:
  std::optional<double> delivered_at_s_;
  std::optional<DeliveredWork> work_;
  std::optional<BatchWork> batch_;
  double ahead_s_ = 0;
  bool is_odd_ = false;
};

}  // namespace penstock::graph
