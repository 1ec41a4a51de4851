// SPDX-License-Identifier: Apache-2.0
#pragma once
// Repeatedly chooses a loader's number of workers, from how the time of its epochs is spent. Pure: the caller reads
// clocks and counters.

#include <cstdint>
#include <optional>
#include <vector>

#include "scheduling/worker_choice.h"

namespace penstock::scheduling {

// A loader's counters so far.
struct BatchCounts {
  uint64_t batches = 0;  // delivered
  uint64_t ready = 0;    // made, and not delivered yet
  double wait_s = 0;     // the trainer waited
  double fetch_s = 0;    // workers were at work
};

// Seconds on a CPU, or waiting for one.
struct CpuTimes {
  std::optional<double> workers_s{};  // of all workers; nullopt if the system does not provide it
  double trainer_s = 0;
};

// Accumulates stretches of epochs with one number of workers, until they are taken together. A stretch starts after the
// delivery of a batch and ends after the delivery of another one. Thread-compatible.
class StallMeter {
 public:
  // Opens a stretch at `now_s`; a batch was just delivered. `owner` identifies the owner of the stretch and must not be
  // 0. If another owner left a stretch open, that one ends here without counts of its waits, so all data is discarded.
  void begin(uint64_t owner, uint32_t workers, const BatchCounts& counts, const CpuTimes& cpu, double now_s);
  bool is_open(uint64_t owner) const { return owner_ == owner; }
  // A batch was delivered by a call between these times.
  void note(double called_at_s, double returned_at_s);
  void end(const BatchCounts& counts, const CpuTimes& cpu);

  bool has_seen(double seconds, uint64_t batches) const;
  // The means over the batches since the last call, which are then discarded. At least one batch must have arrived.
  MeasuredWork take();
  // Number of batches whose times are kept one by one; only sums are kept of the others.
  size_t kept_count() const { return sums_.trainer_seconds.size(); }

 private:
  struct Sums {
    uint32_t workers = 0;
    double elapsed_s = 0, wait_s = 0, fetch_s = 0, call_s = 0, cpu_s = 0, trainer_cpu_s = 0;
    uint64_t batches = 0, noted_batches = 0, made_batches = 0;
    std::vector<double> trainer_seconds{};  // of single batches, limited in number
  };

  uint64_t owner_ = 0;  // of the open stretch; 0: none
  BatchCounts counts_before_;
  CpuTimes cpu_before_;
  double began_at_s_ = 0;
  double returned_at_s_ = 0;
  Sums sums_;
};

// Decides how many workers a loader needs. Thread-compatible.
class WorkerTuner {
 public:
  static constexpr double kFirstWindowS = 2.0;

  explicit WorkerTuner(double window_s = kFirstWindowS) : first_window_s_(window_s), window_s_(window_s) {}

  StallMeter& meter() { return meter_; }
  // Whether enough batches were seen with this number of workers to choose again.
  bool is_due(uint32_t workers) const;
  // The next number of workers, from the measurements.
  const WorkerChoice& choose(const WorkerLimits& limits);
  // This many could not be started; the loader continues with the previous number.
  void give_up(uint32_t workers_before);
  const std::optional<WorkerChoice>& choice() const { return choice_; }

 private:
  StallMeter meter_;
  std::optional<WorkerChoice> choice_;
  Lessons lessons_;
  double first_window_s_;
  double window_s_;
};

}  // namespace penstock::scheduling
