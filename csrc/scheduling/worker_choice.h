// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many workers a job can use: measurements in, a number out. Pure. Used by a loader that chooses the number of its
// local workers, and by a pool for each of its jobs (scaling.h).
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
    kStalled,    // more, because the trainer waited
    kSettled,    // unchanged
    kLimit,      // the trainer waited, and the limit is reached
    kNoGain,     // the trainer waited, and more workers did not help
    kTakenBack,  // a step up did not make batches faster
    kPartGain,   // a step up made batches faster, but fewer workers would have sufficed
    kIdle,       // fewer are enough
    kTimes,      // by the times of batches alone: waits are not informative, because workers join and leave
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
struct Lessons {
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
std::pair<WorkerChoice, Lessons> choose_workers(const MeasuredWork& measured, const WorkerLimits& limits,
                                                Lessons lessons);

// By the seconds per batch alone, for cases in which waits are not informative about the number of workers.
WorkerChoice choose_by_seconds(const MeasuredWork& measured, const WorkerLimits& limits);

}  // namespace penstock::scheduling
