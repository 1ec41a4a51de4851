// SPDX-License-Identifier: Apache-2.0
#include "cluster/scaling.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace penstock::cluster {
namespace {

constexpr uint64_t kStepsMin = 8;
constexpr double kIdleShareOfPool = 0.35;  // above it fewer workers would do; others may have use for them
constexpr double kGrowthOfPool = 1e6;      // workers on other machines do not share CPUs: no need for small steps
constexpr double kLinkFull = 0.8;          // of what the link carries
constexpr double kComputing = 0.5;         // of a worker's time on CPUs; with less of it, it waits
constexpr double kOtherTimes = 2;          // times longer or shorter
constexpr double kIdleBesides = 0.15;      // of the workers' time, while the trainer waits
constexpr double kSpareBesides = 1.25;
constexpr uint32_t kShrunkMin = 2;    // batches, by which a queue gets shorter that its workers do not keep full
constexpr double kSpareWorth = 0.05;  // of a job's progress

using Reason = WorkerChoice::Reason;

bool counts_anew(const wire::QueueSignal& now, const wire::QueueSignal& before) {
  return now.delivered_batches < before.delivered_batches || now.step_count < before.step_count ||
         now.made_batches < before.made_batches || now.starved_ns < before.starved_ns;
}

bool is_other(double now, double then) { return now > kOtherTimes * then || then > kOtherTimes * now; }

double seconds(uint64_t ns) { return static_cast<double>(ns) / 1e9; }

// In steps and waiting for batches, from one report to another.
double trained_s(const wire::QueueSignal& first, const wire::QueueSignal& last) {
  return seconds(last.stepping_ns - first.stepping_ns + last.starved_ns - first.starved_ns);
}

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

void JobScaler::note(const wire::TrainerReport& report, uint32_t worker_count, Instant now) {
  const wire::QueueSignal& queue = report.queue;
  if (counts_anew(queue, last_)) *this = JobScaler(first_demand_);
  last_ = queue;
  worker_count_max_ = report.worker_count_max;
  if (worker_count != stretch_.worker_count || stretch_.report_count == 0) begin_stretch(worker_count, now);
  ++stretch_.report_count;
  if (worker_count == 0) return;
  if (!stretch_.first) {
    if (now - stretch_.begun_at >= kWarmUp) stretch_.first = queue;
    return;
  }
  const bool is_starving = queue.ready_batches == 0 && !queue.is_paused;
  if (is_starving && 2 * queue.asked_batches < std::min(queue.wanted_batches, 2 * worker_count))
    ++stretch_.short_asked_count;
  if (is_due(queue)) choose(queue, report.worker_count_max, now);
}

void JobScaler::begin_stretch(uint32_t worker_count, Instant now) {
  stretch_ = {.worker_count = worker_count, .begun_at = now};
}

bool JobScaler::is_due(const wire::QueueSignal& queue) const {
  const wire::QueueSignal& first = *stretch_.first;
  return trained_s(first, queue) >= std::chrono::duration<double>(kStretchMin).count() &&
         queue.step_count - first.step_count >= kStepsMin &&
         queue.made_batches - first.made_batches >= 2 * uint64_t{stretch_.worker_count};
}

MeasuredWork JobScaler::measure(const wire::QueueSignal& queue) const {
  const wire::QueueSignal& first = *stretch_.first;
  const auto step_count = static_cast<double>(queue.step_count - first.step_count);
  const auto made_count = static_cast<double>(queue.made_batches - first.made_batches);
  const double made_s = seconds(queue.made_ns - first.made_ns);
  const double trainer_s = seconds(queue.stepping_ns - first.stepping_ns) / step_count;
  double wait_s = seconds(queue.starved_ns - first.starved_ns) / step_count;
  // A trainer that lives on batches that were there waits less than its workers will soon have it wait.
  if (queue.ready_batches + kShrunkMin <= first.ready_batches && 2 * queue.ready_batches < queue.wanted_batches)
    wait_s = std::max(wait_s, trained_s(first, queue) / made_count - trainer_s);
  return {
      .workers = stretch_.worker_count,
      .wait_s = wait_s,
      .trainer_s = trainer_s,
      .worker_s = made_s / made_count,
      .cpu_share = made_s > 0 ? std::optional(seconds(queue.made_cpu_ns - first.made_cpu_ns) / made_s) : std::nullopt};
}

void JobScaler::choose(const wire::QueueSignal& queue, uint32_t worker_count_max, Instant now) {
  const MeasuredWork measured = measure(queue);
  // The number of workers has not followed the demand, as where others have them: what is known is as before.
  if (choice_ && choice_->workers > measured.workers && measured.workers <= choice_->measured.workers)
    lessons_ = lessons_before_;
  const uint32_t count_max = std::max(1U, worker_count_max);
  const WorkerLimits limits{
      .cpus = count_max, .growth_max = kGrowthOfPool, .idle_share_min = kIdleShareOfPool, .is_of_pool = true};
  const auto bottleneck = bottleneck_of(measured, queue);
  auto [choice, lessons] =
      bottleneck ? std::pair(beside_bottleneck(measured), lessons_) : choose_workers(measured, limits, lessons_);
  if (!settled_ || is_other(measured.trainer_s, settled_->trainer_s)) {
    quick_changes_left_ = kQuickChanges;
    settled_ = measured;
  }
  measured_ = measured;
  ++measurement_count_;
  limit_ = bottleneck ? *bottleneck : limit_of(choice);
  // Batches that were asked of workers which have just come are late, so the first stretch takes no step back.
  const bool is_early =
      stretch_.before_count == 0 && (choice.reason == Reason::kTakenBack || choice.reason == Reason::kPartGain);
  const uint32_t before_count = stretch_.before_count + 1;
  begin_stretch(stretch_.worker_count, now);
  stretch_.before_count = before_count;
  stretch_.report_count = 1;
  stretch_.first = queue;
  if (is_early || (choice.workers != demand_ && !may_change(now))) return;  // measured again until it may
  lessons_before_ = lessons_;
  lessons_ = lessons;
  choice_ = choice;
  if (choice.workers == demand_) return;
  demand_ = choice.workers;
  ++change_count_;
  changed_at_ = now;
  if (quick_changes_left_ > 0) --quick_changes_left_;
}

bool JobScaler::may_change(Instant now) {
  return quick_changes_left_ > 0 || !changed_at_ || now - *changed_at_ >= kChangePause;
}

// The trainer waits, and its workers do so too.
std::optional<JobLimit> JobScaler::bottleneck_of(const MeasuredWork& measured, const wire::QueueSignal& queue) const {
  if (measured.stalled_share() <= kStalledShareMax || measured.idle_share() < kIdleBesides) return std::nullopt;
  const wire::QueueSignal& first = *stretch_.first;
  const double bytes_per_s = static_cast<double>(queue.made_bytes - first.made_bytes) / trained_s(first, queue);
  if (queue.link_bytes_per_s > 0 && bytes_per_s >= kLinkFull * static_cast<double>(queue.link_bytes_per_s))
    return JobLimit::kLink;
  if (2 * stretch_.short_asked_count > stretch_.report_count) return JobLimit::kSampler;
  return std::nullopt;
}

// As many workers as are at work, and some to spare, where more would wait as well.
WorkerChoice JobScaler::beside_bottleneck(const MeasuredWork& measured) {
  const double at_work = measured.workers * (1 - measured.idle_share());
  const auto kept = static_cast<uint32_t>(std::max(1.0, std::ceil(kSpareBesides * at_work)));
  return {.workers = std::min(measured.workers, kept), .reason = Reason::kNoGain, .measured = measured};
}

JobLimit JobScaler::limit_of(const WorkerChoice& choice) const {
  if (measured_->stalled_share() <= kStalledShareMax) return JobLimit::kTrainer;
  const bool computes = !measured_->cpu_share || *measured_->cpu_share >= kComputing;
  const bool is_of_no_use =
      choice.reason == Reason::kNoGain || choice.reason == Reason::kTakenBack || choice.reason == Reason::kPartGain;
  if (!is_of_no_use) return computes ? JobLimit::kWorkers : JobLimit::kWaiting;
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
  // Workers beyond those that keep the trainer busy are there for batches that take longer than most.
  const double busy = std::min(1.0, useful * std::max(measured_->trainer_s, 1e-6) / measured_->worker_s);
  return (1 - kSpareWorth) * busy + kSpareWorth * useful / most;
}

std::string JobScaler::reason() const { return choice_ ? choice_->why() : "nothing is measured yet"; }

}  // namespace penstock::cluster
