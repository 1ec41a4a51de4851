// SPDX-License-Identifier: Apache-2.0
#include "scheduling/worker_tuner.h"

#include <algorithm>
#include <utility>

namespace penstock::scheduling {
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
  auto [choice, lessons] = choose_workers(measured, limits, lessons_);
  lessons_ = lessons;
  window_s_ = choice.workers == measured.workers ? std::min(kWindowMaxS, 2 * window_s_) : first_window_s_;
  choice_ = choice;
  return *choice_;
}

void WorkerTuner::give_up(uint32_t workers_before) {
  lessons_.grown_from.reset();
  lessons_.no_more_than = workers_before;
}

}  // namespace penstock::scheduling
