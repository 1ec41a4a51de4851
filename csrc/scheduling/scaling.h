// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many of a pool's workers one job can use. Pure: takes the trainer's reports and the time, returns a demand.
//
//   demand      by worker_choice.h, which `num_workers="auto"` uses as well: batches per second that the trainer would
//               consume, times a worker's seconds per batch, divided by the target utilisation of the workers
//   effect      after a change the job is measured again. Workers that brought no gain are not kept, and the actual
//               bottleneck of the job is reported: its link, its storage, its sampler.
//   hysteresis  kQuickChanges changes at first and whenever the time per batch has changed considerably; after that one
//               per kChangePause, each after a stretch of time with a constant number of workers
//   pauses      evaluations, checkpoints, first steps and the ends of epochs are excluded from the measurements; the
//               trainer detects them (step_clock.h). Workers that move to a validation loader and return only interrupt
//               a stretch. If they stay too briefly for a stretch to end, the demand follows from the times of the
//               batches alone.

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "scheduling/worker_choice.h"
#include "wire/reports.h"

namespace penstock::scheduling {

// The assumed demand of a job without measurements, if workers have to be started for it.
constexpr uint32_t kFirstDemand = 4;
constexpr uint32_t kQuickChanges = 4;
constexpr Duration kChangePause = std::chrono::seconds(60);
constexpr Duration kStretchMin = std::chrono::seconds(2);     // minimum time that is measured
constexpr Duration kWarmUp = std::chrono::milliseconds(750);  // after a change in the number of workers; not measured
constexpr uint32_t kUnsteadyFactor = 4;  // times the length of a stretch, in total, without a completed stretch

// The job's bottleneck: the resource that has to be increased or sped up to make it faster.
enum class JobLimit : uint8_t {
  kUnknown,  // not enough data
  kTrainer,  // batches are ready before they are needed
  kWorkers,  // workers, which compute
  kWaiting,  // more workers: they wait, for example for storage, and more of them wait in parallel
  kLink,     // batches fill the link's capacity
  kStorage,  // workers wait longer the more of them there are
  kSampler,  // the trainer does not request batches fast enough
  kOther,    // more workers were of no use, for an unknown reason
};
const char* limit_name(JobLimit limit);

// Thread-compatible.
class JobScaler {
 public:
  // `first_demand` is the demand of a job without measurements.
  explicit JobScaler(uint32_t first_demand = kFirstDemand) : first_demand_(first_demand), demand_(first_demand) {}

  // `worker_count` workers work for the trainer. Reports must be in chronological order; if the total of batches
  // decreases, the trainer has restarted; if the total of steps decreases, its next iterator has started.
  void note(const wire::TrainerReport& report, uint32_t worker_count, Instant now);

  // The number of workers that the job can use, at most the maximum in the last report: 0 if the trainer requests none.
  uint32_t demand() const;
  // The same even while the trainer requests none, for example between two epochs.
  uint32_t training_demand() const { return demand_; }
  // The part of the demand that keeps the trainer busy if each batch takes as long as most do. The rest is spare.
  uint32_t busy_count() const;
  // The job's speed with this many workers as a share of its full speed, from 0 to 1, as far as it is known.
  double progress(uint32_t worker_count) const;

  JobLimit limit() const { return limit_; }
  // The last measurement; nullopt before the first.
  const std::optional<MeasuredWork>& measured() const { return measured_; }
  // The reason for the demand, as a sentence.
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
  // A period with a constant number of workers.
  struct Stretch {
    uint32_t worker_count = 0;
    Instant begun_at{};  // or resumed
    Work work{};
    std::optional<wire::QueueSignal> until{};  // the last report in `work`; nullopt while workers warm up
    uint32_t ready_at_first = 0;               // batches at the end of the warm-up
    uint64_t short_request_count = 0;          // reports of a trainer that waited and had requested too few batches
    uint64_t report_count = 0;
    uint32_t before_count = 0;  // consecutive stretches with this number of workers before this one
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
  std::map<uint32_t, Stretch> interrupted_{};  // by number of workers; cleared by each measurement
  Work unmeasured_{};                          // since the last measurement, with any number of workers
  uint32_t most_workers_ = 0;                  // in that time
  std::optional<wire::QueueSignal> last_{};
  uint32_t worker_count_max_ = 0;
  uint32_t first_demand_;
  uint32_t demand_;
  std::optional<MeasuredWork> measured_{};
  std::optional<WorkerChoice> choice_{};
  TuningHistory history_{};
  // The lessons before the last choice: a step up that was not granted teaches no lesson.
  TuningHistory history_before_{};
  std::optional<MeasuredWork> settled_{};  // when quick changes were last allowed
  uint32_t quick_changes_left_ = kQuickChanges;
  std::optional<Instant> changed_at_{};
  uint64_t change_count_ = 0;
  uint64_t measurement_count_ = 0;
  JobLimit limit_ = JobLimit::kUnknown;
};

}  // namespace penstock::scheduling
