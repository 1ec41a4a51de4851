// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many workers a job can use: measurements in, a number out. Used by a loader that chooses the number of its local
// workers, again and again as a WorkerTuner, and by a pool for each of its jobs (scaling.h). Pure: the caller reads
// clocks and counters.
//
// A worker's seconds per batch divided by the trainer's give the number of workers that keep a trainer busy. The number
// of local workers approaches it in steps of at most a factor of two, because the times depend on the number: workers
// share CPUs, disks and networks. A step up that did not shorten the waiting is reverted and retried less and less
// often, because the machine may have been busy with other work; if it did the work of fewer workers, that number is
// kept. A number with which the trainer waited is also returned to less and less often, and only if, by the time per
// batch, half of the workers would be idle. So the number settles, until the time per batch changes considerably.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace penstock::scheduling {

inline constexpr double kStalledShareMax = 0.05;  // of the trainer's time; below it more workers bring no gain
inline constexpr double kIdleShareMin = 0.5;      // of the workers' time; above it fewer are enough

// Means over a stretch of an epoch in which `workers` workers were at work; in seconds per batch.
struct MeasuredWork {
  uint32_t workers = 1;
  double wait_s = 0;                  // the trainer waited for the batch
  double trainer_s = 0;               // the trainer was at work
  double worker_s = 0;                // one worker was at work, by the clock
  std::optional<double> cpu_share{};  // of worker_s: it was on a CPU or waited for one; none: unknown
  double trainer_cpus = 0;            // CPUs in use by the trainer's process, including its waiting

  double stalled_share() const;  // of the trainer's time
  double idle_share() const;     // of the workers' time

  friend bool operator==(const MeasuredWork&, const MeasuredWork&) = default;
};

// The limits imposed by the machine and the loader.
struct WorkerLimits {
  uint32_t cpus = 1;
  uint32_t waiting_workers = 4;      // for datasets that wait rather than compute
  std::optional<uint32_t> shards{};  // of an iterable dataset; further workers would be idle
  double growth_max = 2;             // factor, in one step
  double idle_share_min = kIdleShareMin;
  // `cpus` is the only limit on a pool's workers, which do not share CPUs.
  bool is_of_pool = false;

  static WorkerLimits of(uint32_t cpus, std::optional<uint32_t> shards = std::nullopt);
  // The initial number, before the first measurement.
  uint32_t first_workers() const;
};

struct WorkerChoice {
  enum class Reason : uint8_t {
    kStalled,   // more, because the trainer waited
    kSettled,   // unchanged
    kLimit,     // the trainer waited, and the limit is reached
    kNoGain,    // the trainer waited, and more workers did not help
    kReverted,  // a step up did not make batches faster
    kPartGain,  // a step up made batches faster, but fewer workers would have sufficed
    kIdle,      // fewer are enough
    kTimes,     // by the times of batches alone: waits are not informative, because workers join and leave
  };
  enum class LimitedBy : uint8_t { kCpus, kShards, kCap, kPool };

  uint32_t workers = 1;
  Reason reason = Reason::kSettled;
  MeasuredWork measured;
  uint32_t limit = 1;  // the largest number that could have been chosen
  LimitedBy limited_by = LimitedBy::kCpus;
  uint32_t cpus = 1;
  std::optional<MeasuredWork> fewer{};  // with which the trainer waited too long, earlier

  // The reason for the number and the time per batch, as a sentence.
  std::string why() const;
  // The same for a loader that chooses, with the number of workers and of available CPUs.
  std::string text() const;

  friend bool operator==(const WorkerChoice&, const WorkerChoice&) = default;
};

// The results of earlier choices. Initially empty.
struct TuningHistory {
  static constexpr uint32_t kFirstPatience = 8;  // choices until a reverted step up is tried again

  std::optional<MeasuredWork> grown_from{};  // the previous choice was a step up; the measurement before it
  uint32_t too_few = 0;                      // the trainer waited with this many
  std::optional<uint32_t> no_more_than{};
  std::optional<MeasuredWork> basis{};  // the measurement from which these follow
  uint32_t kept = 0;                    // choices limited by no_more_than
  uint32_t held = 0;                    // choices kept above too_few, contrary to the times of batches
  uint32_t patience = kFirstPatience;   // doubled each time it is exhausted
};

// The next number of workers, and the lessons for the next choice.
std::pair<WorkerChoice, TuningHistory> choose_workers(const MeasuredWork& measured, const WorkerLimits& limits,
                                                      TuningHistory history);

// By the seconds per batch alone, for cases in which waits are not informative about the number of workers.
WorkerChoice choose_by_seconds(const MeasuredWork& measured, const WorkerLimits& limits);

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

// Repeatedly chooses a loader's number of workers, from how the time of its epochs is spent. Thread-compatible.
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
  TuningHistory history_;
  double first_window_s_;
  double window_s_;
};

}  // namespace penstock::scheduling
