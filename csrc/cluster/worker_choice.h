// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many workers a job has use for: measured numbers in, a number out. Pure. A loader that chooses the number of its
// local workers goes by it, and so does a pool for each of its jobs (scaling.h).
//
// Worker seconds over trainer seconds of a batch is how many workers keep a trainer busy. The number of local workers
// goes there by at most twofold steps, since seconds change with the number: workers share CPUs, disks and networks. A
// step up that did not shorten the waiting is taken back and tried again more and more seldom, since the machine may
// have been busy with something else; of one that did the work of fewer workers, as many are kept. A number for which
// the trainer waited is gone down to again more and more seldom as well, and only if by the times of batches half of it
// would be idle. So the number settles, until a batch takes a quite different time.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace penstock::cluster {

inline constexpr double kStalledShareMax = 0.05;  // of the trainer's time; below it nothing is gained by more workers
inline constexpr double kIdleShareMin = 0.5;      // of the workers' time; above it fewer would do

// Means over a stretch of an epoch in which `workers` workers were at work; seconds of a batch.
struct MeasuredWork {
  uint32_t workers = 1;
  double wait_s = 0;                  // the trainer waited for it
  double trainer_s = 0;               // the trainer was at work
  double worker_s = 0;                // one worker was at work, by the clock
  std::optional<double> cpu_share{};  // of worker_s: it was on a CPU or waited for one; none: unknown
  double trainer_cpus = 0;            // that the trainer's process had in use, its waiting included

  double stalled_share() const;  // of the trainer's time
  double idle_share() const;     // of the workers' time

  friend bool operator==(const MeasuredWork&, const MeasuredWork&) = default;
};

// The bounds that the machine and the loader set.
struct WorkerLimits {
  uint32_t cpus = 1;
  uint32_t waiting_workers = 4;      // for datasets that wait rather than compute
  std::optional<uint32_t> shards{};  // of an iterable dataset; further workers would have nothing to do
  double growth_max = 2;             // times as many, in one step
  double idle_share_min = kIdleShareMin;
  // `cpus` bounds a pool's workers, which have CPUs of their own, and nothing else does.
  bool is_of_pool = false;

  static WorkerLimits of(uint32_t cpus, std::optional<uint32_t> shards = std::nullopt);
  // To begin with, before anything is measured.
  uint32_t first_workers() const;
};

struct WorkerChoice {
  enum class Reason : uint8_t {
    kStalled,    // more, since the trainer waited
    kSettled,    // as many as before
    kLimit,      // the trainer waited, and there is no room for more
    kNoGain,     // the trainer waited, and more workers did not help
    kTakenBack,  // a step up has made batches no faster
    kPartGain,   // a step up has made batches faster, as fewer workers would have
    kIdle,       // fewer would do
    kTimes,      // the times of batches say so, and waits say nothing, as workers come and go
  };
  enum class LimitedBy : uint8_t { kCpus, kShards, kCap, kPool };

  uint32_t workers = 1;
  Reason reason = Reason::kSettled;
  MeasuredWork measured;
  uint32_t limit = 1;  // the most workers that would have been chosen
  LimitedBy limited_by = LimitedBy::kCpus;
  uint32_t cpus = 1;
  std::optional<MeasuredWork> fewer{};  // for which the trainer waited too long, before

  // In a sentence: why so many, and what a batch takes.
  std::string why() const;
  // The same, for a loader that chooses: with how many they are, and the CPUs that there are.
  std::string text() const;

  friend bool operator==(const WorkerChoice&, const WorkerChoice&) = default;
};

// The results of earlier choices. Empty to begin with.
struct Lessons {
  static constexpr uint32_t kFirstPatience = 8;  // choices until a step up that was taken back is tried again

  std::optional<MeasuredWork> grown_from{};  // the choice before was a step up, and this was before it
  uint32_t too_few = 0;                      // the trainer waited for this many
  std::optional<uint32_t> no_more_than{};
  std::optional<MeasuredWork> basis{};  // when these were seen
  uint32_t kept = 0;                    // choices that kept to no_more_than
  uint32_t held = 0;                    // choices that kept above too_few, against the times of batches
  uint32_t patience = kFirstPatience;   // doubled each time that it was run out of
};

// The number of workers to go on with, and the lessons for the next choice.
std::pair<WorkerChoice, Lessons> choose_workers(const MeasuredWork& measured, const WorkerLimits& limits,
                                                Lessons lessons);

// By the seconds of a batch alone, where waits say nothing about the number of workers.
WorkerChoice choose_by_seconds(const MeasuredWork& measured, const WorkerLimits& limits);

}  // namespace penstock::cluster
