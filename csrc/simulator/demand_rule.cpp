// SPDX-License-Identifier: Apache-2.0
#include "simulator/demand_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/result.h"
#include "scheduling/allocation.h"
#include "scheduling/scaling.h"
#include "session/worker_session.h"

namespace penstock::simulator {
namespace {

using wire::QueueSignal;

double seconds(uint64_t ns) { return static_cast<double>(ns) / 1e9; }
double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

// A trainer's work between two reports.
struct Stretch {
  double step_count = 0;
  double stepping_s = 0;
  double starved_s = 0;
  double made_count = 0;
  double made_s = 0;

  static Stretch between(const QueueSignal& first, const QueueSignal& last) {
    return {.step_count = static_cast<double>(last.step_count - first.step_count),
            .stepping_s = seconds(last.stepping_ns - first.stepping_ns),
            .starved_s = seconds(last.starved_ns - first.starved_ns),
            .made_count = static_cast<double>(last.made_batches - first.made_batches),
            .made_s = seconds(last.made_ns - first.made_ns)};
  }
  bool has_batches() const { return step_count > 0 && made_count > 0 && stepping_s > 0; }
};

double straight_progress(uint32_t worker_count, uint32_t demand) {
  return static_cast<double>(std::min(worker_count, demand)) / std::max(demand, 1U);
}

class PenstockRule final : public DemandRule {
 public:
  PenstockRule(uint32_t gpus, uint32_t cpu_count) : gpus_(gpus), cpu_count_(cpu_count) {}

  bool note(const wire::TrainerReport& report, uint32_t worker_count, Instant now) override {
    if (worker_count != worker_count_) {
      worker_count_ = worker_count;
      is_measured_ = false;
    }
    const uint64_t measured_before = scaler_.measurement_count();
    const uint32_t demand_before = scaler_.demand();
    scaler_.note(report, worker_count, now);
    if (scaler_.measurement_count() == measured_before) return false;
    // Another measurement with the same number of workers counts only if it changes the demand: measurements differ by
    // noise.
    const bool is_first = !std::exchange(is_measured_, true);
    return is_first || scaler_.demand() != demand_before;
  }
  uint32_t demand() const override { return scaler_.measured() ? scaler_.demand() : cpu_count_; }
  uint32_t busy_count() const override { return scaler_.measured() ? scaler_.busy_count() : cpu_count_; }
  double progress(uint32_t worker_count) const override {
    if (!scaler_.measured()) return std::min(1.0, 1.0 * worker_count / (1.0 * gpus_ * cpu_count_));
    return scaler_.progress(worker_count);
  }
  // As a live trainer does, until the current number of workers has been measured.
  std::optional<Duration> wants_report_in() const override {
    if (is_measured_ || worker_count_ == 0) return std::nullopt;
    return session::kPingInterval;
  }

 private:
  uint32_t gpus_;
  uint32_t cpu_count_;  // of the pool: available workers may as well be used for a job without measurements
  scheduling::JobScaler scaler_{std::numeric_limits<uint32_t>::max()};
  uint32_t worker_count_ = 0;
  bool is_measured_ = false;
};

class TfDataServiceRule final : public DemandRule {
 public:
  explicit TfDataServiceRule(uint32_t first) : demand_(first) {}

  bool note(const wire::TrainerReport& report, uint32_t worker_count, Instant) override {
    const Stretch seen = Stretch::between(last_, report.queue);
    if (!seen.has_batches() || seen.stepping_s + seen.starved_s < seconds(scheduling::kStretchMin)) return false;
    last_ = report.queue;
    const double needed = seen.made_s / seen.made_count / (seen.stepping_s / seen.step_count);
    needed_count_ = needed_count_ == 0 ? needed : needed_count_ + kNewestWeight * (needed - needed_count_);
    const uint32_t most = std::min(4 * worker_count, worker_count + 500);
    demand_ = std::clamp(static_cast<uint32_t>(std::ceil(needed_count_)), 1U, std::max(1U, most));
    return true;
  }
  uint32_t demand() const override { return demand_; }
  double progress(uint32_t worker_count) const override { return straight_progress(worker_count, demand_); }
  std::optional<Duration> wants_report_in() const override {
    if (needed_count_ > 0) return std::nullopt;
    return session::kPingInterval;
  }

 private:
  static constexpr double kNewestWeight = 0.3;  // weight of a measurement against the earlier ones

  uint32_t demand_;
  QueueSignal last_{};
  double needed_count_ = 0;
};

// Counts in units of one worker per GPU.
class CachewRule final : public DemandRule {
 public:
  explicit CachewRule(uint32_t gpus) : gpus_(gpus) {}

  bool note(const wire::TrainerReport& report, uint32_t worker_count, Instant now) override {
    const bool has_other_count = std::exchange(worker_count_, worker_count) != worker_count;
    if (has_other_count || !first_at_ || worker_count != demand()) {
      half_.reset();
      // The rule waits while it is granted less than it requested.
      first_at_ = worker_count == demand() ? std::optional(now) : std::nullopt;
      return false;
    }
    if (!half_ && now - *first_at_ >= kCachewPeriod / 2) half_ = report.queue;
    if (!half_ || now - *first_at_ < (is_scaling_ ? kCachewPeriod : kStablePeriods * kCachewPeriod)) return false;
    const Stretch seen = Stretch::between(*half_, report.queue);
    if (!seen.has_batches()) return false;
    first_at_ = now;
    half_.reset();
    return choose((seen.stepping_s + seen.starved_s) / seen.step_count);
  }
  uint32_t demand() const override { return units_ * gpus_; }
  double progress(uint32_t worker_count) const override { return straight_progress(worker_count, demand()); }
  std::optional<Duration> wants_report_in() const override {
    if (!is_scaling_ || !first_at_) return std::nullopt;
    return kCachewPeriod / 2;
  }

 private:
  static constexpr double kImprovementMin = 0.07;
  static constexpr double kSlower = 1.5;  // times the time at which it settled
  static constexpr int kStablePeriods = 20;
  static constexpr uint32_t kUnitsMax = 100;

  bool choose(double batch_s) {
    if (!is_scaling_) {
      if (batch_s <= kSlower * settled_s_ || units_ == kUnitsMax) return false;
      is_scaling_ = true;
      before_s_ = batch_s;
      ++units_;
      return true;
    }
    const bool is_faster = !before_s_ || 1 - batch_s / *before_s_ > kImprovementMin;
    if (is_faster && units_ < kUnitsMax) {
      before_s_ = batch_s;
      ++units_;
      return true;
    }
    is_scaling_ = false;
    settled_s_ = is_faster ? batch_s : *before_s_;
    if (!is_faster) --units_;
    return true;
  }

  uint32_t gpus_;
  uint32_t units_ = 1;
  uint32_t worker_count_ = 0;
  std::optional<Instant> first_at_{};  // start of the period
  std::optional<QueueSignal> half_{};  // in the middle of the period, when newly added workers are at work
  bool is_scaling_ = true;
  std::optional<double> before_s_{};  // per batch, with one unit less
  double settled_s_ = 0;
};

class RayDataRule final : public DemandRule {
 public:
  explicit RayDataRule(uint32_t first) : demand_(first) {}

  bool note(const wire::TrainerReport& report, uint32_t worker_count, Instant now) override {
    if (worker_count != worker_count_ || !first_at_) {
      worker_count_ = worker_count;
      begin(report.queue, now);
      low_since_.reset();
      has_answer_ = false;
      return false;
    }
    if (now - *first_at_ < kRayRequestGap) return false;
    const Stretch seen = Stretch::between(first_, report.queue);
    const double busy_count = std::min(1.0 * worker_count, seen.made_s / seconds(now - *first_at_));
    begin(report.queue, now);
    has_answer_ = true;
    if (busy_count >= kBusyMin * worker_count) {
      low_since_.reset();
      return ask_for(std::min(2 * worker_count, worker_count + kStepMax));
    }
    if (!low_since_) low_since_ = now;
    if (now - *low_since_ < kRayIdleTime) return ask_for(worker_count);
    low_since_.reset();
    return ask_for(std::max(1U, static_cast<uint32_t>(std::ceil(busy_count))));
  }
  uint32_t demand() const override { return demand_; }
  double progress(uint32_t worker_count) const override { return straight_progress(worker_count, demand_); }
  std::optional<Duration> wants_report_in() const override {
    if (has_answer_) return std::nullopt;
    return kRayRequestGap;
  }

 private:
  static constexpr double kBusyMin = 0.5;
  static constexpr uint32_t kStepMax = 256;

  void begin(const QueueSignal& queue, Instant now) {
    first_ = queue;
    first_at_ = now;
  }
  bool ask_for(uint32_t count) {
    const bool is_other = count != demand_;
    demand_ = count;
    return is_other;
  }

  uint32_t demand_;
  uint32_t worker_count_ = 0;
  bool has_answer_ = false;  // about the current number of workers
  QueueSignal first_{};
  std::optional<Instant> first_at_{};
  std::optional<Instant> low_since_{};  // since then less than half of the workers were at work
};

}  // namespace

std::unique_ptr<DemandRule> make_demand_rule(CpuPolicy policy, const Job& job, const Cluster& cluster) {
  const uint32_t share = job.gpus * cluster.cpus_per_gpu;
  switch (policy) {
    case CpuPolicy::kPenstock: return std::make_unique<PenstockRule>(job.gpus, cluster.cpu_count());
    case CpuPolicy::kTfDataService: return std::make_unique<TfDataServiceRule>(share);
    case CpuPolicy::kCachew: return std::make_unique<CachewRule>(job.gpus);
    case CpuPolicy::kRayData: return std::make_unique<RayDataRule>(share);
    case CpuPolicy::kProportional:
    case CpuPolicy::kTuned:
    case CpuPolicy::kInfinite: break;
  }
  PENSTOCK_ASSERT(false, "a job without a pool has no rule for its workers");
  return nullptr;
}

namespace {

std::vector<uint32_t> granted(std::span<const PooledJob> jobs, uint32_t cpu_count) {
  std::vector<uint32_t> counts;
  uint32_t left = cpu_count;
  for (const PooledJob& job : jobs) {
    counts.push_back(std::clamp(job.rule->demand(), 1U, job.gpus));
    left -= counts.back();
  }
  for (size_t job = 0; job < jobs.size(); ++job) {
    const uint32_t more = std::min(left, std::max(jobs[job].rule->demand(), counts[job]) - counts[job]);
    counts[job] += more;
    left -= more;
  }
  return counts;
}

// Each GPU of a job has a separate trainer, as in live jobs, and all trainers of a job make the same claim.
std::vector<uint32_t> allocated(std::span<const PooledJob> jobs, uint32_t cpu_count, const Settings& settings) {
  std::vector<scheduling::JobClaim> claims;
  for (const PooledJob& job : jobs) {
    scheduling::JobClaim claim{.job_id = job.job_id, .floor_max = (job.rule->busy_count() + job.gpus - 1) / job.gpus};
    const uint32_t most = (std::min(job.rule->demand(), cpu_count) + job.gpus - 1) / job.gpus;
    for (uint32_t count = 0; count <= most; ++count) claim.progress.push_back(job.rule->progress(count * job.gpus));
    for (uint32_t gpu = 0; gpu < job.gpus; ++gpu) {
      claim.worker_count = job.count / job.gpus + (gpu < job.count % job.gpus ? 1 : 0);
      claims.push_back(claim);
    }
  }
  const scheduling::AllocationOptions options{
      .floor_share = settings.floor_share, .move_cost_s = settings.move_cost_s, .horizon_s = settings.horizon_s};
  const std::vector<uint32_t> of_trainers = scheduling::gpu_progress(claims, cpu_count, options);
  const auto fault = scheduling::check_allocation(claims, cpu_count, options, of_trainers);
  PENSTOCK_ASSERT(!fault, *fault);
  std::vector<uint32_t> counts;
  auto next = of_trainers.begin();
  for (const PooledJob& job : jobs) {
    counts.push_back(std::accumulate(next, next + job.gpus, 0U));
    next += job.gpus;
  }
  return counts;
}

}  // namespace

std::vector<uint32_t> pooled_counts(CpuPolicy policy, std::span<const PooledJob> jobs, uint32_t cpu_count,
                                    const Settings& settings) {
  return policy == CpuPolicy::kPenstock ? allocated(jobs, cpu_count, settings) : granted(jobs, cpu_count);
}

std::vector<double> tuned_counts(std::span<const double> demands, std::span<const double> shares, double cpu_count) {
  std::vector<double> counts(demands.begin(), demands.end());
  double beyond = std::accumulate(counts.begin(), counts.end(), 0.0) - cpu_count;
  while (beyond > 1e-9) {
    size_t largest = 0;
    for (size_t job = 1; job < counts.size(); ++job)
      if (counts[job] - shares[job] > counts[largest] - shares[largest]) largest = job;
    const double given_back = std::min(beyond, counts[largest] - shares[largest]);
    if (given_back <= 0) break;
    counts[largest] -= given_back;
    beyond -= given_back;
  }
  return counts;
}

}  // namespace penstock::simulator
