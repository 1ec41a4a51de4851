// SPDX-License-Identifier: Apache-2.0
#include "scheduling/worker_choice.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace penstock::scheduling {
namespace {

constexpr double kSpare = 1.25;  // times the ratio of the means, because the times of batches vary
constexpr double kCpuBoundShare = 0.75;
constexpr double kTrainerCpuMin = 0.5;  // of a CPU, used by the trainer; above it one CPU is reserved for the trainer
constexpr double kGainMin = 0.5;        // of the ideal gain, in which workers do not slow each other down
constexpr double kPartShare = 0.7;      // of a step up; it is reduced if fewer than this do the same work
constexpr double kPartSpare = 1.1;
constexpr double kOtherConditions = 2.0;  // factor, in either direction
constexpr double kSecondsMin = 1e-3;      // per batch in the trainer; a shorter time is noise
constexpr double kCountMax = 1e6;         // workers, before the machine's CPUs limit them

using Reason = WorkerChoice::Reason;
using LimitedBy = WorkerChoice::LimitedBy;

uint32_t count_of(double count) { return static_cast<uint32_t>(std::clamp(count, 1.0, kCountMax)); }

uint32_t needed(const MeasuredWork& measured) {
  return count_of(std::ceil(kSpare * measured.worker_s / std::max(measured.trainer_s, 1e-6)));
}

// The largest useful number of workers, and the reason for the limit. One CPU is reserved for a trainer that uses it
// more than half of the time. Workers that wait use less than a CPU each, workers with threads more.
std::pair<uint32_t, LimitedBy> limit_of(const MeasuredWork& measured, const WorkerLimits& limits) {
  if (limits.is_of_pool) return {limits.cpus, LimitedBy::kPool};
  const uint32_t cpus = measured.trainer_cpus > kTrainerCpuMin ? std::max(1U, limits.cpus - 1) : limits.cpus;
  const double share = measured.cpu_share ? std::max(*measured.cpu_share, 1e-3) : 1.0;
  uint32_t most = cpus;
  LimitedBy why = LimitedBy::kCpus;
  if (share < kCpuBoundShare) {
    most = std::max(cpus, count_of(cpus / share));
    if (most > limits.waiting_workers) {
      most = limits.waiting_workers;
      why = LimitedBy::kCap;
    }
  } else if (share > 1 / kCpuBoundShare) {
    most = count_of(cpus / share);
  }
  if (limits.shards && *limits.shards < most) return {*limits.shards, LimitedBy::kShards};
  return {most, why};
}

bool has_gained(const MeasuredWork& before, const MeasuredWork& after) {
  const double at_best = static_cast<double>(before.workers) / after.workers;
  return after.wait_s <= before.wait_s * (1 - kGainMin * (1 - at_best));
}

// How many workers with the speed measured `before` would produce batches at the current rate.
double worth(const MeasuredWork& before, const MeasuredWork& after) {
  const auto rate = [](const MeasuredWork& work) { return 1 / std::max(work.wait_s + work.trainer_s, 1e-9); };
  return before.workers * rate(after) / rate(before);
}

bool is_very_different(double now, double then) {
  const double ratio = std::max(now, kSecondsMin) / std::max(then, kSecondsMin);
  return ratio < 1 / kOtherConditions || ratio > kOtherConditions;
}

// Whether the time per batch has changed considerably since the lessons were learned. Slower batches with more workers
// do not count, nor do faster ones with fewer: workers may slow each other down.
bool is_elsewhere(const MeasuredWork& measured, const std::optional<MeasuredWork>& basis) {
  if (!basis) return false;
  if (is_very_different(measured.trainer_s, basis->trainer_s)) return true;
  const bool is_slower = measured.worker_s > basis->worker_s;
  const bool is_by_number = is_slower ? measured.workers > basis->workers : measured.workers < basis->workers;
  return !is_by_number && is_very_different(measured.worker_s, basis->worker_s);
}

bool is_contradicted(const MeasuredWork& measured, uint32_t too_few) {
  return measured.worker_s < (1 - kIdleShareMin) * too_few * measured.trainer_s;
}

std::string counted(uint32_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string formatted(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string share_text(double share) { return formatted("%.0f%%", 100 * share); }

std::string duration_text(double seconds) {
  if (seconds >= 10) return formatted("%.0f s", seconds);
  if (seconds >= 1) return formatted("%.1f s", seconds);
  return formatted(seconds >= 0.01 ? "%.0f ms" : "%.2g ms", seconds * 1e3);
}

std::string limit_text(const WorkerChoice& choice) {
  switch (choice.limited_by) {
    case LimitedBy::kCpus:
      if (choice.cpus > 1 && choice.measured.trainer_cpus > kTrainerCpuMin)
        return "one of the " + std::to_string(choice.cpus) + " CPUs is reserved for it, which leaves room for " +
               std::to_string(choice.limit);
      return "no more than " + std::to_string(choice.limit) + " would have CPUs to run on";
    case LimitedBy::kShards: return "the dataset has no more than " + counted(choice.limit, "shard");
    case LimitedBy::kPool: return "it may have at most " + std::to_string(choice.limit);
    case LimitedBy::kCap: return std::to_string(choice.limit) + " is the maximum that is tried";
  }
  return "";
}

std::string reason_text(const WorkerChoice& choice) {
  const MeasuredWork& seen = choice.measured;
  std::string stalled = "the trainer waited " + share_text(seen.stalled_share()) + " of the time";
  const std::string count = std::to_string(seen.workers);
  switch (choice.reason) {
    case Reason::kStalled: return stalled + " for " + count;
    case Reason::kSettled:
      if (!choice.fewer) return stalled;
      return stalled + ", and " + share_text(choice.fewer->stalled_share()) + " for " +
             std::to_string(choice.fewer->workers);
    case Reason::kLimit: return stalled + ", but " + limit_text(choice);
    case Reason::kNoGain: return stalled + ", but more workers did not help";
    case Reason::kReverted: return count + " were tried and did not make batches faster, " + stalled;
    case Reason::kPartGain:
      return count + " were tried and did the work of " + std::to_string(choice.workers) + ", " + stalled;
    case Reason::kIdle: return stalled + " and " + count + " were idle " + share_text(seen.idle_share()) + " of it";
    case Reason::kTimes: return "the number of workers changes, so only batch times are used";
  }
  return "";
}

}  // namespace

double MeasuredWork::stalled_share() const { return wait_s / std::max(wait_s + trainer_s, 1e-9); }

double MeasuredWork::idle_share() const {
  return std::max(0.0, 1 - worker_s / std::max(workers * (wait_s + trainer_s), 1e-9));
}

WorkerLimits WorkerLimits::of(uint32_t cpus, std::optional<uint32_t> shards) {
  return {.cpus = cpus, .waiting_workers = std::max(cpus, std::min(4 * cpus, 32U)), .shards = shards};
}

uint32_t WorkerLimits::first_workers() const {
  return std::max(1U, std::min({2U, std::max(1U, cpus) - 1, shards.value_or(2)}));
}

std::pair<WorkerChoice, TuningHistory> choose_workers(const MeasuredWork& measured, const WorkerLimits& limits,
                                                      TuningHistory history) {
  const uint32_t count = measured.workers;
  const auto [limit, limited_by] = limit_of(measured, limits);
  const auto choose = [&, limit = limit, limited_by = limited_by](uint32_t workers, Reason reason,
                                                                  std::optional<MeasuredWork> fewer = std::nullopt) {
    return WorkerChoice{.workers = workers,
                        .reason = reason,
                        .measured = measured,
                        .limit = limit,
                        .limited_by = limited_by,
                        .cpus = limits.cpus,
                        .fewer = fewer};
  };

  const std::optional<MeasuredWork> before = std::exchange(history.grown_from, std::nullopt);
  // A step to more than twice as many is not reverted as a whole.
  if (before && measured.stalled_share() > kStalledShareMax && count > 2 * before->workers) {
    const uint32_t kept = std::max(before->workers, count_of(std::ceil(kPartSpare * worth(*before, measured))));
    if (kept < kPartShare * count) {
      const TuningHistory part{
          .too_few = before->workers, .no_more_than = kept, .basis = measured, .patience = history.patience};
      return {choose(kept, Reason::kPartGain), part};
    }
  }
  if (before && !has_gained(*before, measured)) {
    const TuningHistory taken_back{.too_few = std::min(history.too_few, before->workers - 1),
                                   .no_more_than = before->workers,
                                   .basis = before,
                                   .patience = history.patience};
    return {choose(before->workers, Reason::kReverted), taken_back};
  }
  if (!before && is_elsewhere(measured, history.basis)) history = {};
  if (measured.stalled_share() > kStalledShareMax) {
    if (history.kept >= history.patience) {
      history.no_more_than.reset();
      history.kept = 0;
      history.patience *= 2;
    }
    const uint32_t most = std::min(limit, history.no_more_than.value_or(limit));
    const uint32_t wanted = std::max(needed(measured), count + std::max(1U, count / 4));
    const uint32_t workers = std::min({wanted, count_of(limits.growth_max * count), most});
    if (workers <= count) {
      if (count >= limit) return {choose(count, Reason::kLimit), history};
      ++history.kept;
      return {choose(count, Reason::kNoGain), history};
    }
    history.grown_from = measured;
    history.too_few = count;
    history.basis = measured;
    return {choose(workers, Reason::kStalled), history};
  }
  // The trainer waited for so few workers, but half of them would be idle by the current time per batch.
  if (history.too_few >= needed(measured) && is_contradicted(measured, history.too_few) &&
      ++history.held >= history.patience) {
    history.too_few = needed(measured) - 1;
    history.held = 0;
    history.patience *= 2;
  }
  const uint32_t workers = std::max(needed(measured), history.too_few + 1);
  if (workers < count && measured.idle_share() > limits.idle_share_min)
    return {choose(workers, Reason::kIdle), history};
  const bool is_of_fewer = history.basis && history.basis->workers == history.too_few && history.too_few < count;
  return {choose(count, Reason::kSettled, is_of_fewer ? history.basis : std::nullopt), history};
}

WorkerChoice choose_by_seconds(const MeasuredWork& measured, const WorkerLimits& limits) {
  const auto [limit, limited_by] = limit_of(measured, limits);
  const uint32_t most = std::min(limit, count_of(limits.growth_max * measured.workers));
  return {.workers = std::min(needed(measured), most),
          .reason = Reason::kTimes,
          .measured = measured,
          .limit = limit,
          .limited_by = limited_by,
          .cpus = limits.cpus};
}

std::string WorkerChoice::why() const {
  std::string on_cpu;
  if (measured.cpu_share) on_cpu = ", " + share_text(std::min(1.0, *measured.cpu_share)) + " of it on a CPU,";
  return reason_text(*this) + "; a batch takes " + duration_text(measured.worker_s) + " of a worker" + on_cpu +
         " and " + duration_text(measured.trainer_s) + " of the trainer";
}

std::string WorkerChoice::text() const {
  return counted(workers, "worker") + ": " + why() + ", and the process may use " + counted(cpus, "CPU");
}

namespace {

constexpr double kWindowMaxS = 64.0;
constexpr uint64_t kBatchesMin = 8;        // and two per worker
constexpr size_t kSecondsKeptMax = 10000;  // of single batches; a window may contain millions
constexpr double kPauseMin = 10;           // times the median: longer is a pause, for example a validation

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace

void StallMeter::begin(uint64_t owner, uint32_t workers, const BatchCounts& counts, const CpuTimes& cpu, double now_s) {
  if (owner_ != 0 || workers != sums_.workers) sums_ = {};
  owner_ = owner;
  sums_.workers = workers;
  counts_before_ = counts;
  cpu_before_ = cpu;
  began_at_s_ = returned_at_s_ = now_s;
}

void StallMeter::note(double called_at_s, double returned_at_s) {
  if (sums_.trainer_seconds.size() < kSecondsKeptMax) sums_.trainer_seconds.push_back(called_at_s - returned_at_s_);
  ++sums_.noted_batches;
  sums_.call_s += returned_at_s - called_at_s;
  returned_at_s_ = returned_at_s;
}

void StallMeter::end(const BatchCounts& counts, const CpuTimes& cpu) {
  owner_ = 0;
  const uint64_t batches = counts.batches - counts_before_.batches;
  sums_.elapsed_s += returned_at_s_ - began_at_s_;
  sums_.trainer_cpu_s += cpu.trainer_s - cpu_before_.trainer_s;
  sums_.batches += batches;
  sums_.wait_s += counts.wait_s - counts_before_.wait_s;
  sums_.fetch_s += counts.fetch_s - counts_before_.fetch_s;
  if (!cpu.workers_s || !cpu_before_.workers_s) return;
  sums_.cpu_s += *cpu.workers_s - *cpu_before_.workers_s;
  // Made are the delivered batches and the increase in ready ones.
  sums_.made_batches += batches + counts.ready - counts_before_.ready;
}

bool StallMeter::has_seen(double seconds, uint64_t batches) const {
  if (owner_ == 0) return sums_.elapsed_s >= seconds && sums_.batches >= batches;
  return sums_.elapsed_s + returned_at_s_ - began_at_s_ >= seconds && sums_.noted_batches >= batches;
}

MeasuredWork StallMeter::take() {
  const Sums sums = std::exchange(sums_, {});
  const auto batches = static_cast<double>(std::max<uint64_t>(1, sums.batches));
  double at_work_s = 0;
  if (!sums.trainer_seconds.empty()) {
    const double pause_s = kPauseMin * median(sums.trainer_seconds);
    for (const double seconds : sums.trainer_seconds) at_work_s += std::min(seconds, pause_s);
    at_work_s /= static_cast<double>(sums.trainer_seconds.size());
  }
  MeasuredWork measured{.workers = sums.workers,
                        .wait_s = sums.wait_s / batches,
                        // The call itself also takes time, of which no worker can relieve the trainer.
                        .trainer_s = at_work_s + std::max(0.0, sums.call_s - sums.wait_s) / batches,
                        .worker_s = sums.fetch_s / batches,
                        .trainer_cpus = sums.trainer_cpu_s / std::max(sums.elapsed_s, 1e-9)};
  if (sums.made_batches > 0 && measured.worker_s > 0)
    measured.cpu_share = sums.cpu_s / static_cast<double>(sums.made_batches) / measured.worker_s;
  return measured;
}

bool WorkerTuner::is_due(uint32_t workers) const {
  return meter_.has_seen(window_s_, std::max<uint64_t>(kBatchesMin, 2ULL * workers));
}

const WorkerChoice& WorkerTuner::choose(const WorkerLimits& limits) {
  const MeasuredWork measured = meter_.take();
  auto [choice, history] = choose_workers(measured, limits, history_);
  history_ = history;
  window_s_ = choice.workers == measured.workers ? std::min(kWindowMaxS, 2 * window_s_) : first_window_s_;
  choice_ = choice;
  return *choice_;
}

void WorkerTuner::give_up(uint32_t workers_before) {
  history_.grown_from.reset();
  history_.no_more_than = workers_before;
}

}  // namespace penstock::scheduling
