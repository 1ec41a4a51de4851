// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many of a pool's workers one job has use for: the trainer's reports and the time in, a demand out. Pure.
//
//   demand      by worker_choice.h, which `num_workers="auto"` goes by as well: batches a second that the trainer would
//               take, times the seconds of a worker for a batch, over the utilisation that workers are planned for
//   effect      after a change the job is measured anew. Of workers that brought nothing none is kept, and what limits
//               the job instead is named: its link, its storage, its sampler.
//   hysteresis  kQuickChanges changes at first and where batches take a quite different time; after that one in
//               kChangePause, each after a stretch of time that has the same number of workers from end to end
//   pauses      evaluations, checkpoints, first steps and the ends of epochs are no part of what is measured; the
//               trainer tells them apart (step_clock.h). Workers that go to a validation loader and come back only
//               interrupt a stretch. If they stay too briefly for a stretch to end, the demand follows from the times
//               of the batches alone.

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/instant.h"
#include "cluster/worker_choice.h"
#include "wire/reports.h"

namespace penstock::cluster {

// A job of which nothing is measured yet is given so many, where workers have to be started for it.
constexpr uint32_t kFirstDemand = 4;
constexpr uint32_t kQuickChanges = 4;
constexpr Duration kChangePause = std::chrono::seconds(60);
constexpr Duration kStretchMin = std::chrono::seconds(2);     // that is measured
constexpr Duration kWarmUp = std::chrono::milliseconds(750);  // after a change in the number of workers; not measured
constexpr uint32_t kUnsteadyFactor = 4;  // times what a stretch needs, in all, without a stretch that ended

// What would have to be more or faster for the job to go faster.
enum class JobLimit : uint8_t {
  kUnknown,  // too little was seen
  kTrainer,  // batches are ready before they are wanted
  kWorkers,  // which compute
  kWaiting,  // more workers: they wait, as for storage, and more of them wait side by side
  kLink,     // batches fill the link
  kStorage,  // workers wait longer the more of them there are
  kSampler,  // the trainer does not ask for batches fast enough
  kOther,    // more workers were of no use, and it is not seen why
};
const char* limit_name(JobLimit limit);

// Thread-compatible.
class JobScaler {
 public:
  // `first_demand` is that of a job of which nothing is measured.
  explicit JobScaler(uint32_t first_demand = kFirstDemand) : first_demand_(first_demand), demand_(first_demand) {}

  // `worker_count` workers work for the trainer. Reports are taken in the order of time; a total of batches that is
  // less than before is that of a trainer that began anew, one of steps that of its next iterator.
  void note(const wire::TrainerReport& report, uint32_t worker_count, Instant now);

  // Workers that the job has use for; at most those of the last report, so 0 where the trainer asks for nothing.
  uint32_t demand() const;
  // The same while the trainer asks for nothing, as between two epochs.
  uint32_t training_demand() const { return demand_; }
  // Of them, those that keep the trainer busy if each batch takes as long as most do. The others are to spare.
  uint32_t busy_count() const;
  // The share of its full speed, from 0 to 1, that the job has with so many workers, as far as it is known.
  double progress(uint32_t worker_count) const;

  JobLimit limit() const { return limit_; }
  // The last measurement; nothing before the first.
  const std::optional<MeasuredWork>& measured() const { return measured_; }
  // Why the demand is what it is, in a sentence.
  std::string reason() const;
  uint64_t change_count() const { return change_count_; }
  uint64_t measurement_count() const { return measurement_count_; }

 private:
  // Sums over the time between reports.
  struct Work {
    uint64_t step_count = 0;
    uint64_t stepping_ns = 0;
    uint64_t starved_ns = 0;
    uint64_t made_batches = 0;
    uint64_t made_ns = 0;
    uint64_t made_cpu_ns = 0;
    uint64_t made_bytes = 0;

    void add(const wire::QueueSignal& from, const wire::QueueSignal& to);
    double trained_s() const;  // in steps and waiting for batches
    bool is_enough(uint32_t worker_count, uint32_t factor = 1) const;
    MeasuredWork means(uint32_t worker_count) const;
  };
  // Time with one number of workers.
  struct Stretch {
    uint32_t worker_count = 0;
    Instant begun_at{};  // or gone on with
    Work work{};
    std::optional<wire::QueueSignal> until{};  // the last report in `work`; nothing while workers warm up
    uint32_t ready_at_first = 0;               // batches, when they had warmed up
    uint64_t short_asked_count = 0;            // reports of a trainer that waited and had asked for too little
    uint64_t report_count = 0;
    uint32_t before_count = 0;  // stretches with this number of workers before it, without a break
  };

  void set_worker_count(uint32_t worker_count, Instant now);
  MeasuredWork measure(const wire::QueueSignal& queue) const;
  void choose(const wire::QueueSignal& queue, Instant now);
  void choose_by_times(Instant now);
  WorkerLimits limits() const;
  void note_measurement(const MeasuredWork& measured);
  void adopt(const WorkerChoice& choice, Instant now);
  std::optional<JobLimit> bottleneck_of(const MeasuredWork& measured, const wire::QueueSignal& queue) const;
  static WorkerChoice beside_bottleneck(const MeasuredWork& measured);
  JobLimit limit_of(const WorkerChoice& choice) const;
  bool may_change(Instant now) const;

  Stretch stretch_;
  std::map<uint32_t, Stretch> interrupted_{};  // by their number of workers; none outlives a measurement
  Work unmeasured_{};                          // since the last measurement, whoever came and went
  uint32_t most_workers_ = 0;                  // meanwhile
  std::optional<wire::QueueSignal> last_{};
  uint32_t worker_count_max_ = 0;
  uint32_t first_demand_;
  uint32_t demand_;
  std::optional<MeasuredWork> measured_{};
  std::optional<WorkerChoice> choice_{};
  Lessons lessons_{};
  // A step up that was not granted has taught nothing.
  Lessons lessons_before_{};
  std::optional<MeasuredWork> settled_{};  // when quick changes were last allowed
  uint32_t quick_changes_left_ = kQuickChanges;
  std::optional<Instant> changed_at_{};
  uint64_t change_count_ = 0;
  uint64_t measurement_count_ = 0;
  JobLimit limit_ = JobLimit::kUnknown;
};

}  // namespace penstock::cluster
