// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chooses a loader's number of workers again and again, from where the time of its epochs goes. Pure: clocks and
// counters are its caller's.

#include <cstdint>
#include <optional>
#include <vector>

#include "cluster/worker_choice.h"

namespace penstock::cluster {

// The counters of a loader so far.
struct BatchCounts {
  uint64_t batches = 0;  // delivered
  uint64_t ready = 0;    // made, and not delivered
  double wait_s = 0;     // the trainer waited
  double fetch_s = 0;    // workers were at work
};

// Seconds on a CPU, or waiting for one.
struct CpuTimes {
  std::optional<double> workers_s{};  // of all workers; none where the system does not say
  double trainer_s = 0;
};

// Adds up stretches of epochs for one number of workers, until they are taken together. A stretch begins after a batch
// was delivered and ends after another one. Thread-compatible.
class StallMeter {
 public:
  // Opens a stretch at `now_s`; a batch was just delivered. `owner` is not 0, and says whose the stretch is. One that
  // another owner left open ends here without having counted its waits, so all is forgotten.
  void begin(uint64_t owner, uint32_t workers, const BatchCounts& counts, const CpuTimes& cpu, double now_s);
  bool is_open(uint64_t owner) const { return owner_ == owner; }
  // A batch was delivered, for a call that lasted from then until then.
  void note(double called_at_s, double returned_at_s);
  void end(const BatchCounts& counts, const CpuTimes& cpu);

  bool has_seen(double seconds, uint64_t batches) const;
  // The means over the batches since the last call, which are forgotten. At least one batch has come.
  MeasuredWork take();
  // Batches of which each one's time is kept; of the others the sums are.
  size_t kept_count() const { return sums_.trainer_seconds.size(); }

 private:
  struct Sums {
    uint32_t workers = 0;
    double elapsed_s = 0, wait_s = 0, fetch_s = 0, call_s = 0, cpu_s = 0, trainer_cpu_s = 0;
    uint64_t batches = 0, noted_batches = 0, made_batches = 0;
    std::vector<double> trainer_seconds{};  // of single batches, up to a number
  };

  uint64_t owner_ = 0;  // of the stretch that is open
  BatchCounts counts_before_;
  CpuTimes cpu_before_;
  double began_at_s_ = 0;
  double returned_at_s_ = 0;
  Sums sums_;
};

// A loader's knowledge of how many workers it needs. Thread-compatible.
class WorkerTuner {
 public:
  static constexpr double kFirstWindowS = 2.0;

  explicit WorkerTuner(double window_s = kFirstWindowS) : first_window_s_(window_s), window_s_(window_s) {}

  StallMeter& meter() { return meter_; }
  // Whether enough batches were seen with this number of workers to choose anew.
  bool is_due(uint32_t workers) const;
  // The number of workers to go on with, by the meter.
  const WorkerChoice& choose(const WorkerLimits& limits);
  // So many could not be started; the loader goes on with those that it had before.
  void give_up(uint32_t workers_before);
  const std::optional<WorkerChoice>& choice() const { return choice_; }

 private:
  StallMeter meter_;
  std::optional<WorkerChoice> choice_;
  Lessons lessons_;
  double first_window_s_;
  double window_s_;
};

}  // namespace penstock::cluster
