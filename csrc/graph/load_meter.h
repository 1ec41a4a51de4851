// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures the costs of a batch in the trainer and in a worker while a loader runs. Pure: the caller provides clock
// times and counters.
//
// A step is the time from one delivery to the next: the trainer works on the batch, then waits for the next one. A
// worker reports for each batch how long it took, and how much of that was for boundary tensors. Means exclude the
// longest and the shortest tenth, so that pauses of the program or of the machine do not count.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "graph/price.h"

namespace penstock::graph {

// The counters of a loader's stream so far; seconds are its workers' seconds.
struct DeliveredWork {
  uint64_t batches = 0;
  uint64_t with_boundary = 0;  // among these
  double fetch_s = 0;          // at work on batches, boundary tensors included
  double prefix_s = 0;         // of that, on boundary tensors
  uint64_t bytes = 0;          // of the batches
  uint32_t workers = 0;        // their present number, in an elastic pool; 0: as at the start of the epoch
  LinkRate link{};             // to remote workers, at present
};

// Means over some steps; seconds are per batch.
struct MeasuredLoads {
  size_t steps = 0;
  uint32_t workers = 1;
  uint32_t cpus = 1;        // available to the trainer and the workers together
  double trainer_s = 0;     // the trainer at work on it
  double fetch_s = 0;       // a worker at work on it, boundary tensors included
  double prefix_s = 0;      // of that, on boundary tensors
  double bytes = 0;         // of the batch, as received
  LinkRate link{};          // over which it was received
  double step_s = 0;        // from delivery to delivery
  double step_error_s = 0;  // the standard error of step_s

  // One line for a log.
  std::string text() const;
  friend bool operator==(const MeasuredLoads&, const MeasuredLoads&) = default;
};

struct MiddleMean {
  double mean = 0;
  double error = 0;  // its standard error; infinite for one value
};

// Returns the mean of `values` without the lowest and the highest tenth. There must be at least one.
MiddleMean middle_mean(std::vector<double> values);

// Records the steps of a loader's newest iterator. Thread-compatible.
class LoadMeter {
 public:
  // At most this many steps are kept: the oldest are dropped.
  static constexpr size_t kStepsMax = 512;

  // Call at the start of an epoch, with the number of workers. The time between two epochs is not a step. Up to
  // `in_flight_max` batches may be in flight at any time.
  void begin(uint32_t workers, uint32_t in_flight_max);
  // Call after a batch was delivered, with the start and end time of the call of next().
  void note(double called_at_s, double returned_at_s, const DeliveredWork& work);
  // Call after the program waited for batches in order to look ahead at them.
  void note_waiting(double seconds) { ahead_s_ += seconds; }
  // Call with the time that the trainer's device worked on a batch.
  void note_device(double seconds);
  // Marks this step as unusual, because a plan was made or batches were compared in it.
  void skip() { is_atypical_ = true; }
  // Call after a plan has changed, or after an occasional activity has stopped. Batches in flight are not measured
  // either.
  void forget();
  // Restarts measuring with the very next step.
  void clear();

  size_t step_count() const { return steps_.size(); }
  // Whether at least `steps` steps have been recorded that took at least `seconds` together, or as many as are kept.
  bool has_seen(size_t steps, double seconds) const;
  // Returns the means over the steps since forget(), only of steps with boundary tensors if `needs_boundary`; none if
  // less than half of the steps qualify. `cpus` is for the result.
  std::optional<MeasuredLoads> measured(bool needs_boundary, uint32_t cpus) const;

 private:
  // The work of a worker on one batch.
  struct BatchWork {
    double fetch_s = 0;
    double prefix_s = 0;
    double bytes = 0;
    bool has_boundary = false;
  };
  // One batch, from its delivery to the next delivery.
  struct Step {
    double work_s = 0;
    double wait_s = 0;
    BatchWork batch;
  };

  std::deque<Step> steps_;
  std::deque<double> device_seconds_;
  uint32_t workers_ = 1;
  uint32_t in_flight_max_ = 0;  // maximal number of batches requested before a plan changed
  uint32_t settling_ = 0;       // steps that are still to be left out
  double seen_s_ = 0;
  // About the newest delivery:
  std::optional<double> delivered_at_s_;
  std::optional<DeliveredWork> work_;
  std::optional<BatchWork> batch_;
  double ahead_s_ = 0;
  bool is_atypical_ = false;
};

}  // namespace penstock::graph
