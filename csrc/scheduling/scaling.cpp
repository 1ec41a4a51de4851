// SPDX-License-Identifier: Apache-2.0
#include "scheduling/scaling.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace penstock::scheduling {
namespace {

constexpr uint64_t kStepsMin = 8;
constexpr double kIdleShareOfPool = 0.35;  // above it fewer workers are enough; other jobs may need them
// Workers on other machines do not share CPUs, so steps are large. Each is measured before the next: the times of a
// trainer with short steps would ask for thousands of workers, few of which would be useful.
constexpr double kGrowthOfPool = 8;
constexpr double kLinkFull = 0.8;      // of the link's capacity
constexpr double kComputing = 0.5;     // of a worker's time on CPUs; below it, the worker mostly waits
constexpr double kOtherTimes = 2;      // factor, in either direction
constexpr double kIdleBesides = 0.15;  // of the workers' time, while the trainer waits
constexpr double kSpareBesides = 1.25;
constexpr uint32_t kShrunkMin = 2;    // batches by which a queue shrinks if its workers do not keep it full
constexpr double kSpareWorth = 0.05;  // of a job's progress

using Reason = WorkerChoice::Reason;

bool counts_anew(const wire::QueueSignal& now, const wire::QueueSignal& before) {
  return now.delivered_batches < before.delivered_batches || now.made_batches < before.made_batches;
}

// A new iterator of the loader has started, which counts its steps from 0, while the count of batches continues.
bool counts_steps_anew(const wire::QueueSignal& now, const wire::QueueSignal& before) {
  return now.step_count < before.step_count || now.stepping_ns < before.stepping_ns ||
         now.starved_ns < before.starved_ns;
}

bool is_other(double now, double then) { return now > kOtherTimes * then || then > kOtherTimes * now; }

double seconds(uint64_t ns) { return static_cast<double>(ns) / 1e9; }

}  // namespace

const char* limit_name(JobLimit limit) {
  switch (limit) {
    case JobLimit::kUnknown: return "unknown";
    case JobLimit::kTrainer: return "trainer";
    case JobLimit::kWorkers: return "workers";
    case JobLimit::kWaiting: return "waiting";
    case JobLimit::kLink: return "link";
    case JobLimit::kStorage: return "storage";
    case JobLimit::kSampler: return "sampler";
    case JobLimit::kOther: return "other";
  }
  return "unknown";
}

// ---- Measuring

void JobScaler::Work::add(const wire::QueueSignal& from, const wire::QueueSignal& to) {
  const bool is_anew = counts_steps_anew(to, from);
  step_count += to.step_count - (is_anew ? 0 : from.step_count);
  stepping_ns += to.stepping_ns - (is_anew ? 0 : from.stepping_ns);
  starved_ns += to.starved_ns - (is_anew ? 0 : from.starved_ns);
  made_batches += to.made_batches - from.made_batches;
  made_ns += to.made_ns - from.made_ns;
  made_cpu_ns += to.made_cpu_ns - from.made_cpu_ns;
  made_bytes += to.made_bytes - from.made_bytes;
}

double JobScaler::Work::trained_s() const { return seconds(stepping_ns + starved_ns); }

bool JobScaler::Work::is_enough(uint32_t worker_count, uint32_t factor) const {
  return trained_s() >= factor * std::chrono::duration<double>(kStretchMin).count() &&
         step_count >= factor * kStepsMin && made_batches >= uint64_t{2} * factor * worker_count;
}

MeasuredWork JobScaler::Work::means(uint32_t worker_count) const {
  const auto steps = static_cast<double>(step_count);
  const double made_s = seconds(made_ns);
  return {.workers = worker_count,
          .wait_s = seconds(starved_ns) / steps,
          .trainer_s = seconds(stepping_ns) / steps,
          .worker_s = made_s / static_cast<double>(made_batches),
          .cpu_share = made_s > 0 ? std::optional(seconds(made_cpu_ns) / made_s) : std::nullopt};
}

void JobScaler::note(const wire::TrainerReport& report, uint32_t worker_count, Instant now) {
  const wire::QueueSignal& queue = report.queue;
  if (last_ && counts_anew(queue, *last_)) *this = JobScaler(first_demand_);
  if (last_) unmeasured_.add(*last_, queue);
  most_workers_ = std::max(most_workers_, worker_count);
  last_ = queue;
  worker_count_max_ = report.worker_count_max;
  if (worker_count != stretch_.worker_count || stretch_.report_count == 0) set_worker_count(worker_count, now);
  ++stretch_.report_count;
  if (worker_count > 0 && stretch_.until) {
    stretch_.work.add(*stretch_.until, queue);
    stretch_.until = queue;
    const bool is_starving = queue.ready_batches == 0 && !queue.is_paused;
    if (is_starving && 2 * queue.asked_batches < std::min(queue.wanted_batches, 2 * worker_count))
      ++stretch_.short_request_count;
    if (stretch_.work.is_enough(worker_count)) return choose(queue, now);
  } else if (worker_count > 0 && now - stretch_.begun_at >= kWarmUp) {
    stretch_.until = queue;
    stretch_.ready_at_first = queue.ready_batches;
  }
  if (most_workers_ > 0 && unmeasured_.is_enough(most_workers_, kUnsteadyFactor)) choose_by_times(now);
}

// When a number of workers recurs, its interrupted measurement continues.
void JobScaler::set_worker_count(uint32_t worker_count, Instant now) {
  if (stretch_.worker_count > 0 && stretch_.work.step_count > 0)
    interrupted_.insert_or_assign(stretch_.worker_count, stretch_);
  stretch_ = {.worker_count = worker_count};
  if (auto node = interrupted_.extract(worker_count)) stretch_ = node.mapped();
  stretch_.begun_at = now;
  stretch_.until.reset();
}

MeasuredWork JobScaler::measure(const wire::QueueSignal& queue) const {
  MeasuredWork measured = stretch_.work.means(stretch_.worker_count);
  // A trainer that consumes batches from the queue waits less than it soon will, if its workers are too slow for it. At
  // the end of an epoch it has fewer batches as well.
  if (queue.ready_batches + kShrunkMin <= stretch_.ready_at_first && 2 * queue.ready_batches < queue.wanted_batches)
    measured.wait_s = std::max(measured.wait_s, measured.worker_s / measured.workers - measured.trainer_s);
  return measured;
}

// ---- Choosing

void JobScaler::choose(const wire::QueueSignal& queue, Instant now) {
  const MeasuredWork measured = measure(queue);
  // The number of workers has not followed the demand, for example because other jobs have them: the lessons remain the
  // previous ones.
  if (choice_ && choice_->workers > measured.workers && measured.workers <= choice_->measured.workers)
    history_ = history_before_;
  const auto bottleneck = bottleneck_of(measured, queue);
  auto [choice, history] =
      bottleneck ? std::pair(beside_bottleneck(measured), history_) : choose_workers(measured, limits(), history_);
  note_measurement(measured);
  limit_ = bottleneck ? *bottleneck : limit_of(choice);
  // Batches requested from newly added workers are late, so the first stretch causes no step back.
  const bool is_early =
      stretch_.before_count == 0 && (choice.reason == Reason::kReverted || choice.reason == Reason::kPartGain);
  stretch_ = {.worker_count = stretch_.worker_count,
              .begun_at = now,
              .until = queue,
              .ready_at_first = queue.ready_batches,
              .report_count = 1,
              .before_count = stretch_.before_count + 1};
  if (is_early || (choice.workers != demand_ && !may_change(now))) return;  // measured again until a change is allowed
  history_before_ = history_;
  history_ = history;
  adopt(choice, now);
}

// Waits are not informative if workers were away for most of them.
void JobScaler::choose_by_times(Instant now) {
  MeasuredWork measured = unmeasured_.means(most_workers_);
  measured.wait_s = std::max(0.0, measured.worker_s / measured.workers - measured.trainer_s);
  const WorkerChoice choice = choose_by_seconds(measured, limits());
  note_measurement(measured);
  limit_ = limit_of(choice);
  if (choice.workers == demand_ || may_change(now)) adopt(choice, now);
}

WorkerLimits JobScaler::limits() const {
  return {.cpus = std::max(1U, worker_count_max_),
          .growth_max = kGrowthOfPool,
          .idle_share_min = kIdleShareOfPool,
          .is_of_pool = true};
}

void JobScaler::note_measurement(const MeasuredWork& measured) {
  if (!settled_ || is_other(measured.trainer_s, settled_->trainer_s)) {
    quick_changes_left_ = kQuickChanges;
    settled_ = measured;
  }
  measured_ = measured;
  ++measurement_count_;
  interrupted_.clear();
  unmeasured_ = {};
  most_workers_ = 0;
}

void JobScaler::adopt(const WorkerChoice& choice, Instant now) {
  choice_ = choice;
  if (choice.workers == demand_) return;
  demand_ = choice.workers;
  ++change_count_;
  changed_at_ = now;
  if (quick_changes_left_ > 0) --quick_changes_left_;
}

bool JobScaler::may_change(Instant now) const {
  return quick_changes_left_ > 0 || !changed_at_ || now - *changed_at_ >= kChangePause;
}

// The trainer waits although its workers are partly idle.
std::optional<JobLimit> JobScaler::bottleneck_of(const MeasuredWork& measured, const wire::QueueSignal& queue) const {
  if (measured.stalled_share() <= kStalledShareMax || measured.idle_share() < kIdleBesides) return std::nullopt;
  const double bytes_per_s = static_cast<double>(stretch_.work.made_bytes) / stretch_.work.trained_s();
  if (queue.link_bytes_per_s > 0 && bytes_per_s >= kLinkFull * static_cast<double>(queue.link_bytes_per_s))
    return JobLimit::kLink;
  if (2 * stretch_.short_request_count > stretch_.report_count) return JobLimit::kSampler;
  return std::nullopt;
}

// As many workers as are at work, and some spare ones, because more would only wait as well.
WorkerChoice JobScaler::beside_bottleneck(const MeasuredWork& measured) {
  const double at_work = measured.workers * (1 - measured.idle_share());
  const auto kept = static_cast<uint32_t>(std::max(1.0, std::ceil(kSpareBesides * at_work)));
  return {.workers = std::min(measured.workers, kept), .reason = Reason::kNoGain, .measured = measured};
}

JobLimit JobScaler::limit_of(const WorkerChoice& choice) const {
  if (measured_->stalled_share() <= kStalledShareMax) return JobLimit::kTrainer;
  const bool computes = !measured_->cpu_share || *measured_->cpu_share >= kComputing;
  const bool is_useless =
      choice.reason == Reason::kNoGain || choice.reason == Reason::kReverted || choice.reason == Reason::kPartGain;
  if (!is_useless) return computes ? JobLimit::kWorkers : JobLimit::kWaiting;
  return computes ? JobLimit::kOther : JobLimit::kStorage;
}

uint32_t JobScaler::demand() const { return std::min(demand_, worker_count_max_); }

uint32_t JobScaler::busy_count() const {
  const uint32_t most = demand();
  if (!measured_ || measured_->worker_s <= 0) return most;
  const double busy = std::ceil(measured_->worker_s / std::max(measured_->trainer_s, 1e-6));
  return busy < most ? static_cast<uint32_t>(busy) : most;
}

double JobScaler::progress(uint32_t worker_count) const {
  const uint32_t most = demand();
  if (most == 0) return 0;
  const uint32_t useful = std::min(worker_count, most);
  if (!measured_ || measured_->worker_s <= 0) return static_cast<double>(useful) / most;
  // Workers beyond the number that keeps the trainer busy are a reserve for batches that take longer than most.
  const double busy = std::min(1.0, useful * std::max(measured_->trainer_s, 1e-6) / measured_->worker_s);
  return (1 - kSpareWorth) * busy + kSpareWorth * useful / most;
}

std::string JobScaler::reason() const { return choice_ ? choice_->why() : "no measurements yet"; }

}  // namespace penstock::scheduling
