// SPDX-License-Identifier: Apache-2.0
#include "simulator/simulation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "base/result.h"
#include "session/worker_session.h"
#include "simulator/demand_rule.h"

namespace penstock::simulator {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kPingSeconds = std::chrono::duration<double>(session::kPingInterval).count();

struct RunningJob {
  size_t job = 0;
  double began_s = 0;
  double since_s = 0;  // from then on the job runs at `speed` with `work_s` left
  double work_s = 0;
  double speed = 0;
  std::vector<uint32_t> gpus{};                         // by server
  std::vector<uint32_t> workers{};                      // by server; in a pool
  uint32_t count = 0;                                   // of all of them
  std::vector<std::pair<double, uint32_t>> starting{};  // the times at which they start to work
  double fixed_cpus = 0;                                // without a pool
  std::unique_ptr<DemandRule> rule{};                   // in a pool
  TrainerMeter meter{};                                 // in a pool, up to `metered_s`
  double metered_s = 0;
  TrainerPace pace{};         // since then
  double reports_s = kNever;  // time of the trainer's next report
  double noise = 1;           // factor on the time that a worker takes for a batch, as measured
  bool is_link_bound = false;
  double bytes_per_s = 0;

  double ends_s() const { return speed > 0 ? since_s + work_s / speed : kNever; }
  uint32_t active_count() const {
    uint32_t active = count;
    for (const auto& [time, starting_count] : starting) active -= starting_count;
    return active;
  }
};

class Run {
 public:
  Run(const std::vector<Job>& jobs, const std::vector<Profile>& profiles, const Cluster& cluster,
      const Settings& settings)
      : jobs_(jobs),
        profiles_(profiles),
        cluster_(cluster),
        settings_(settings),
        free_gpus_(cluster.server_count, cluster.gpus_per_server),
        free_cpus_(cluster.server_count, cluster.cpus_per_server()),
        random_(settings.seed) {
    outcome_.jobs.resize(jobs.size());
    for (const Job& job : jobs) left_s_.push_back(job.duration_s);
    outcome_.begin_s = jobs.empty() ? 0.0 : jobs.front().submit_s;
    now_s_ = outcome_.begin_s;
  }

  Outcome run() && {
    while (next_ < jobs_.size() || !running_.empty()) step();
    PENSTOCK_ASSERT(queue_.empty(), "jobs are waiting but none is running");
    outcome_.end_s = now_s_;
    return std::move(outcome_);
  }

 private:
  const Job& job_of(const RunningJob& it) const { return jobs_[it.job]; }
  const Profile& profile_of(const RunningJob& it) const { return profiles_[job_of(it).profile]; }
  bool has_pool() const {
    return settings_.cpus != CpuPolicy::kProportional && settings_.cpus != CpuPolicy::kTuned &&
           settings_.cpus != CpuPolicy::kInfinite;
  }

  void step() {
    double next_s = next_ < jobs_.size() ? jobs_[next_].submit_s : kNever;
    for (const RunningJob& it : running_) {
      next_s = std::min(next_s, it.ends_s());
      for (const auto& start : it.starting) next_s = std::min(next_s, start.first);
      next_s = std::min(next_s, it.reports_s);
    }
    PENSTOCK_ASSERT(next_s < kNever, "no further event would ever happen");
    account(next_s - now_s_);
    now_s_ = next_s;
    ++outcome_.event_count;

    bool is_changed = false;
    for (; next_ < jobs_.size() && jobs_[next_].submit_s <= now_s_; ++next_) queue_.insert({order_key(next_), next_});
    for (size_t place = 0; place < running_.size();) {
      if (running_[place].ends_s() > now_s_) {
        ++place;
        continue;
      }
      finish(place);
      is_changed = true;
    }
    if (settings_.order == GpuOrder::kSrtf && settings_.preempts) preempt();
    is_changed |= start_jobs();
    for (RunningJob& it : running_) begin_work(it);
    for (RunningJob& it : running_)
      if (it.reports_s <= now_s_) is_changed |= report(it);
    if (is_changed) decide();
  }

  double order_key(size_t job) const { return settings_.order == GpuOrder::kFifo ? 0.0 : left_s_[job]; }

  void account(double seconds) {
    for (const RunningJob& it : running_) {
      const double gpus = job_of(it).gpus;
      const double cpus = has_pool() ? it.count : it.fixed_cpus;
      const double share = it.speed / profile_of(it).speed_max();
      outcome_.gpu_held_s += gpus * seconds;
      outcome_.gpu_busy_s += gpus * share * seconds;
      outcome_.cpu_held_s += cpus * seconds;
      outcome_.cpu_busy_s += std::min(cpus, profile_of(it).cpus_needed() * gpus) * seconds;
      outcome_.moved_bytes += it.bytes_per_s * seconds;
    }
  }

  void leave(RunningJob& it) {
    for (uint32_t server = 0; server < cluster_.server_count; ++server) {
      free_gpus_[server] += it.gpus[server];
      free_cpus_[server] += it.workers[server];
    }
    outcome_.jobs[it.job].running_s += now_s_ - it.began_s;
  }

  void finish(size_t place) {
    RunningJob& it = running_[place];
    leave(it);
    outcome_.jobs[it.job].end_s = now_s_;
    ++outcome_.jobs[it.job].end_count;
    running_.erase(running_.begin() + static_cast<ptrdiff_t>(place));
  }

  // Keeps the shortest jobs, running or queued, up to the first one that does not fit, and stops the other running
  // jobs.
  void preempt() {
    if (queue_.empty()) return;
    std::vector<std::pair<double, size_t>> all(queue_.begin(), queue_.end());
    for (const RunningJob& it : running_) all.push_back({it.work_s - (now_s_ - it.since_s) * it.speed, it.job});
    std::sort(all.begin(), all.end());
    std::set<size_t> chosen;
    uint32_t left = cluster_.gpu_count();
    for (const auto& [key, job] : all) {
      if (jobs_[job].gpus > left) break;
      left -= jobs_[job].gpus;
      chosen.insert(job);
    }
    for (size_t place = 0; place < running_.size();) {
      RunningJob& it = running_[place];
      if (chosen.contains(it.job)) {
        ++place;
        continue;
      }
      left_s_[it.job] = it.work_s - (now_s_ - it.since_s) * it.speed + settings_.restart_cost_s;
      queue_.insert({order_key(it.job), it.job});
      leave(it);
      ++outcome_.preempt_count;
      running_.erase(running_.begin() + static_cast<ptrdiff_t>(place));
    }
  }

  bool start_jobs() {
    bool is_changed = false;
    uint32_t free = 0;
    for (const uint32_t gpus : free_gpus_) free += gpus;
    while (!queue_.empty() && jobs_[queue_.begin()->second].gpus <= free) {
      const size_t job = queue_.begin()->second;
      queue_.erase(queue_.begin());
      free -= jobs_[job].gpus;
      if (outcome_.jobs[job].running_s == 0) outcome_.jobs[job].start_s = now_s_;
      running_.push_back({.job = job,
                          .began_s = now_s_,
                          .since_s = now_s_,
                          .work_s = left_s_[job],
                          .gpus = place_gpus(jobs_[job].gpus),
                          .workers = std::vector<uint32_t>(cluster_.server_count, 0),
                          .metered_s = now_s_});
      if (has_pool()) running_.back().rule = make_demand_rule(settings_.cpus, jobs_[job], cluster_);
      is_changed = true;
    }
    return is_changed;
  }

  std::vector<uint32_t> place_gpus(uint32_t count) {
    std::vector<uint32_t> placed(cluster_.server_count, 0);
    size_t tightest = free_gpus_.size();
    for (size_t server = 0; server < free_gpus_.size(); ++server)
      if (free_gpus_[server] >= count && (tightest == free_gpus_.size() || free_gpus_[server] < free_gpus_[tightest]))
        tightest = server;
    while (count > 0) {
      const size_t server =
          tightest < free_gpus_.size()
              ? tightest
              : static_cast<size_t>(std::max_element(free_gpus_.begin(), free_gpus_.end()) - free_gpus_.begin());
      const uint32_t here = std::min(count, free_gpus_[server]);
      PENSTOCK_ASSERT(here > 0, "a job was started without free GPUs");
      placed[server] += here;
      free_gpus_[server] -= here;
      count -= here;
    }
    return placed;
  }

  void begin_work(RunningJob& it) {
    const auto is_due = [&](const auto& start) { return start.first <= now_s_; };
    if (std::erase_if(it.starting, is_due) > 0) set_speed(it);
  }

  void decide() {
    if (settings_.cpus == CpuPolicy::kTuned) tune();
    if (has_pool()) share_pool();
    if (!has_pool() && settings_.cpus != CpuPolicy::kTuned) {
      for (RunningJob& it : running_) {
        if (it.speed > 0) continue;
        const bool is_infinite = settings_.cpus == CpuPolicy::kInfinite;
        it.fixed_cpus = is_infinite ? 0.0 : 1.0 * cluster_.cpus_per_gpu * job_of(it).gpus;
        change_speed(it, is_infinite ? profile_of(it).speed_max() : profile_of(it).speed(cluster_.cpus_per_gpu));
      }
    }
  }

  // All GPUs of a job run at the pace of the server that has the fewest CPUs for them.
  void tune() {
    std::vector<double> per_gpu(running_.size(), kNever);
    for (RunningJob& it : running_) it.fixed_cpus = 0;
    for (uint32_t server = 0; server < cluster_.server_count; ++server) {
      std::vector<size_t> here;
      std::vector<double> demands, shares;
      for (size_t place = 0; place < running_.size(); ++place) {
        const double gpus = running_[place].gpus[server];
        if (gpus == 0) continue;
        here.push_back(place);
        demands.push_back(gpus * profile_of(running_[place]).cpus_needed());
        shares.push_back(gpus * cluster_.cpus_per_gpu);
      }
      const std::vector<double> counts = tuned_counts(demands, shares, cluster_.cpus_per_server());
      double used = 0;
      for (size_t index = 0; index < here.size(); ++index) {
        RunningJob& it = running_[here[index]];
        used += counts[index];
        it.fixed_cpus += counts[index];
        per_gpu[here[index]] = std::min(per_gpu[here[index]], counts[index] / it.gpus[server]);
      }
      PENSTOCK_ASSERT(used <= cluster_.cpus_per_server() + 1e-6, "a server assigned more CPUs than it has");
    }
    for (size_t place = 0; place < running_.size(); ++place)
      change_speed(running_[place], profile_of(running_[place]).speed(per_gpu[place]));
  }

  void share_pool() {
    std::vector<PooledJob> pooled;
    for (const RunningJob& it : running_)
      pooled.push_back({.job_id = it.job, .gpus = job_of(it).gpus, .count = it.count, .rule = it.rule.get()});
    const std::vector<uint32_t> counts = pooled_counts(settings_.cpus, pooled, cluster_.cpu_count(), settings_);
    std::vector<uint32_t> before;
    for (const RunningJob& it : running_) before.push_back(it.count);
    for (size_t place = 0; place < running_.size(); ++place) shrink(running_[place], counts[place]);
    std::vector<bool> is_nearer;
    for (RunningJob& it : running_) is_nearer.push_back(come_near(it));
    for (size_t place = 0; place < running_.size(); ++place) grow(running_[place], counts[place]);
    for (size_t place = 0; place < running_.size(); ++place) {
      RunningJob& it = running_[place];
      if (is_nearer[place] || it.count != before[place]) set_speed(it);
      if (it.count == before[place]) continue;
      it.noise = noise();
      it.reports_s = next_report_s(now_s_ + kPingSeconds, kPingSeconds);
    }
  }

  // The trainer reports. Returns whether the pool must be allocated again.
  bool report(RunningJob& it) {
    meter(it);
    const Instant now{duration_of(now_s_)};
    const bool is_news = it.rule->note(it.meter.report(cluster_.cpu_count()), it.count, now);
    if (is_news) it.noise = noise();
    const auto soon = it.rule->wants_report_in();
    it.reports_s = soon ? next_report_s(now_s_ + std::chrono::duration<double>(*soon).count(), kPingSeconds)
                        : next_report_s(now_s_ + kPingSeconds, settings_.interval_s);
    return is_news;
  }

  // The trainers report at multiples of `step_s`, so that several reports are one event.
  static double next_report_s(double least_s, double step_s) { return step_s * std::ceil(least_s / step_s - 1e-6); }

  // Adds the work of the trainer and its workers since the last call.
  void meter(RunningJob& it) {
    TrainerPace measured = it.pace;
    measured.worker_s *= it.noise;
    it.meter.advance(now_s_ - it.metered_s, measured);
    it.metered_s = now_s_;
  }

  TrainerPace pace_of(const RunningJob& it) const {
    const double active = it.active_count();
    const double gpus = job_of(it).gpus;
    const Profile& profile = profile_of(it);
    const double batches_per_s = gpus / profile.iteration_s;  // at speed 1
    TrainerPace pace{.batches_per_s = it.speed * batches_per_s,
                     .step_s = 1 / (profile.speed_max() * batches_per_s),
                     .link_bytes_per_s = it.bytes_per_s,
                     .link_capacity_bytes_per_s = it.is_link_bound ? it.bytes_per_s : 0.0,
                     .worker_count = it.count};
    // The seconds of a worker do not grow while its batches wait for the link.
    const double workers_speed = profile.speed(active / gpus);
    const bool is_starved = workers_speed < profile.speed_max() * (1 - 1e-9);
    const double at_work = is_starved ? active : std::min(active, profile.cpus_needed() * gpus);
    if (workers_speed > 0) pace.worker_s = at_work / (workers_speed * batches_per_s);
    return pace;
  }

  double noise() { return std::exp(settings_.noise * normal()); }

  // Exchanges workers behind a full link for free CPUs on the servers of the job's GPUs. Returns whether there were
  // any.
  bool come_near(RunningJob& it) {
    if (!it.is_link_bound) return false;
    uint32_t moved = 0;
    uint32_t far = 0;
    for (uint32_t near = 0; near < cluster_.server_count; ++near) {
      while (it.gpus[near] > 0 && free_cpus_[near] > 0) {
        while (far < cluster_.server_count && (it.gpus[far] > 0 || it.workers[far] == 0)) ++far;
        if (far == cluster_.server_count) break;
        --it.workers[far], ++free_cpus_[far];
        ++it.workers[near], --free_cpus_[near];
        ++moved;
      }
    }
    outcome_.move_count += moved;
    moved = std::min(moved, it.active_count());
    if (moved > 0 && settings_.start_delay_s > 0) it.starting.push_back({now_s_ + settings_.start_delay_s, moved});
    return moved > 0;
  }

  double normal() {
    double sum = -6;  // of twelve uniform numbers, the same on every platform
    for (int draw = 0; draw < 12; ++draw) sum += static_cast<double>(random_() >> 11) * 0x1p-53;
    return sum;
  }

  void shrink(RunningJob& it, uint32_t count) {
    while (it.count > count) {
      // Workers that have not started are removed first, then workers behind a link.
      if (!it.starting.empty() && --it.starting.back().second == 0) it.starting.pop_back();
      size_t chosen = it.workers.size();
      for (size_t server = 0; server < it.workers.size(); ++server) {
        if (it.workers[server] == 0) continue;
        if (chosen == it.workers.size() || (it.gpus[chosen] > 0 && it.gpus[server] == 0)) chosen = server;
      }
      --it.workers[chosen];
      ++free_cpus_[chosen];
      --it.count;
    }
  }

  void grow(RunningJob& it, uint32_t count) {
    if (it.count >= count) return;
    const uint32_t more = count - it.count;
    if (it.count > 0 || it.speed > 0) outcome_.move_count += more;
    while (it.count < count) {
      size_t chosen = it.workers.size();
      for (size_t server = 0; server < it.workers.size(); ++server) {
        if (free_cpus_[server] == 0) continue;
        const auto rank = [&](size_t at) { return std::pair(it.gpus[at] > 0, free_cpus_[at]); };
        if (chosen == it.workers.size() || rank(server) > rank(chosen)) chosen = server;
      }
      PENSTOCK_ASSERT(chosen < it.workers.size(), "a policy assigned more CPUs than exist");
      ++it.workers[chosen];
      --free_cpus_[chosen];
      ++it.count;
    }
    if (settings_.start_delay_s > 0) it.starting.push_back({now_s_ + settings_.start_delay_s, more});
  }

  // Workers on the servers of the job's GPUs do not use links. The others send at most the job's share of the links.
  void set_speed(RunningJob& it) {
    meter(it);
    const Profile& profile = profile_of(it);
    const double gpus = job_of(it).gpus;
    const double active = it.active_count();
    double local = 0, link_bytes_per_s = 0;
    for (uint32_t server = 0; server < cluster_.server_count; ++server) {
      if (it.gpus[server] == 0) continue;
      local += it.workers[server];
      link_bytes_per_s += cluster_.link_bytes_per_s * it.gpus[server] / cluster_.gpus_per_server;
    }
    if (it.count > 0) local *= active / it.count;
    const double local_speed = profile.speed(local / gpus);
    const double bytes_per_speed = profile.bytes_per_s() * gpus;
    double speed = profile.speed(active / gpus);
    if (bytes_per_speed > 0) speed = std::min(speed, local_speed + link_bytes_per_s / bytes_per_speed);
    it.is_link_bound = speed < profile.speed(active / gpus);
    it.bytes_per_s = std::max(0.0, speed - local_speed) * bytes_per_speed;
    change_speed(it, speed);
    it.pace = pace_of(it);
  }

  void change_speed(RunningJob& it, double speed) {
    if (speed == it.speed) return;
    it.work_s = std::max(0.0, it.work_s - (now_s_ - it.since_s) * it.speed);
    it.since_s = now_s_;
    it.speed = speed;
  }

  const std::vector<Job>& jobs_;
  const std::vector<Profile>& profiles_;
  const Cluster& cluster_;
  const Settings& settings_;
  double now_s_ = 0;
  size_t next_ = 0;  // the next job to arrive
  std::vector<double> left_s_;
  std::set<std::pair<double, size_t>> queue_;
  std::vector<RunningJob> running_;  // in the order in which they started
  std::vector<uint32_t> free_gpus_;  // by server
  std::vector<uint32_t> free_cpus_;
  std::mt19937_64 random_;
  Outcome outcome_;
};

}  // namespace

Result<Outcome> simulate(const std::vector<Job>& jobs, const std::vector<Profile>& profiles, const Cluster& cluster,
                         const Settings& settings) {
  if (auto checked = check_world(jobs, profiles, cluster, settings); !checked) return checked.error();
  const auto is_earlier = [](const Job& a, const Job& b) { return a.submit_s < b.submit_s; };
  if (!std::is_sorted(jobs.begin(), jobs.end(), is_earlier))
    return Fault{Errc::kMalformed, "the jobs must be in the order of their arrival"};
  return Run(jobs, profiles, cluster, settings).run();
}

namespace {

// Never less than the previous report.
void tell(uint64_t& told, double total) { told = std::max(told, static_cast<uint64_t>(std::max(0.0, total))); }

}  // namespace

void TrainerMeter::advance(double seconds, const TrainerPace& pace) {
  pace_ = pace;
  if (pace.batches_per_s <= 0) return;  // before the first batch: a pause
  const double batches = pace.batches_per_s * seconds;
  step_count_ += batches;
  stepping_s_ += batches * pace.step_s;
  starved_s_ += std::max(0.0, seconds - batches * pace.step_s);
  made_s_ += batches * pace.worker_s;
  made_bytes_ += pace.link_bytes_per_s * seconds;
}

wire::TrainerReport TrainerMeter::report(uint32_t worker_count_max) {
  const double part = step_count_ - std::floor(step_count_);  // of a batch, which is not reported yet
  const double wait_s = pace_.batches_per_s > 0 ? std::max(0.0, 1 / pace_.batches_per_s - pace_.step_s) : 0.0;
  const bool is_starved = wait_s > 1e-9;
  tell(last_.step_count, step_count_);
  tell(last_.delivered_batches, step_count_);
  tell(last_.made_batches, step_count_);
  tell(last_.stepping_ns, 1e9 * (stepping_s_ - part * pace_.step_s));
  tell(last_.starved_ns, 1e9 * (starved_s_ - part * wait_s));
  tell(last_.made_ns, 1e9 * (made_s_ - part * pace_.worker_s));
  last_.made_cpu_ns = last_.made_ns;
  tell(last_.made_bytes, made_bytes_);
  last_.link_bytes_per_s = static_cast<uint64_t>(pace_.link_capacity_bytes_per_s);
  last_.wanted_batches = last_.asked_batches = 2 * pace_.worker_count;
  last_.ready_batches = is_starved ? 0 : 1;
  wire::TrainerReport report;
  report.worker_count_max = worker_count_max;
  report.queue = last_;
  return report;
}

}  // namespace penstock::simulator
