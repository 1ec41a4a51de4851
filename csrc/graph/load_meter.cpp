// SPDX-License-Identifier: Apache-2.0
#include "graph/load_meter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>

#include "base/result.h"

namespace penstock::graph {
namespace {

constexpr double kTrimmed = 0.1;  // fraction of the steps, at either end

}  // namespace

std::string MeasuredLoads::text() const {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(),
                "%zu steps of %.3g ms (+-%.2g ms): %.3g ms of the trainer, %.3g ms of one of %u workers, %.3g ms of "
                "that on boundary tensors, on %u CPUs",
                steps, step_s * 1e3, step_error_s * 1e3, trainer_s * 1e3, fetch_s * 1e3, workers, prefix_s * 1e3, cpus);
  std::string formatted = text.data();
  if (link.bytes_per_s < std::numeric_limits<double>::infinity()) {
    std::snprintf(text.data(), text.size(), ", %.3g MB over a link of %.3g MB/s", bytes * 1e-6,
                  link.bytes_per_s * 1e-6);
    formatted += text.data();
  }
  return formatted;
}

MiddleMean middle_mean(std::vector<double> values) {
  PENSTOCK_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  const auto left_out = static_cast<ptrdiff_t>(static_cast<double>(values.size()) * kTrimmed);
  const std::vector<double> middle(values.begin() + left_out, values.end() - left_out);
  if (middle.size() < 2) return {middle.front(), std::numeric_limits<double>::infinity()};
  const auto count = static_cast<double>(middle.size());
  const double mean = std::accumulate(middle.begin(), middle.end(), 0.0) / count;
  double squares = 0;
  for (const double value : middle) squares += (value - mean) * (value - mean);
  return {mean, std::sqrt(squares / (count - 1) / count)};
}

void LoadMeter::begin(uint32_t workers, uint32_t in_flight_max) {
  if (workers != workers_) forget();
  workers_ = workers;
  in_flight_max_ = in_flight_max;
  delivered_at_s_.reset();
  work_.reset();
  batch_.reset();
  ahead_s_ = 0;
  is_atypical_ = false;
}

void LoadMeter::note(double called_at_s, double returned_at_s, const DeliveredWork& work) {
  if (delivered_at_s_ && batch_ && !is_atypical_) {
    if (settling_ > 0) {
      --settling_;
    } else {
      const Step step{.work_s = called_at_s - *delivered_at_s_ - ahead_s_,
                      .wait_s = returned_at_s - called_at_s + ahead_s_,
                      .batch = *batch_};
      if (steps_.size() == kStepsMax) steps_.pop_front();
      steps_.push_back(step);
      seen_s_ += step.work_s + step.wait_s;
    }
  }
  batch_.reset();
  if (work_ && work.batches == work_->batches + 1)
    batch_ = BatchWork{.fetch_s = work.fetch_s - work_->fetch_s,
                       .prefix_s = work.prefix_s - work_->prefix_s,
                       .bytes = static_cast<double>(work.bytes - work_->bytes),
                       .has_boundary = work.with_boundary > work_->with_boundary};
  if (work.workers > 0 && work.workers != workers_) {
    forget();
    workers_ = work.workers;
  }
  work_ = work;
  delivered_at_s_ = returned_at_s;
  ahead_s_ = 0;
  is_atypical_ = false;
}

void LoadMeter::note_device(double seconds) {
  if (device_seconds_.size() == kStepsMax) device_seconds_.pop_front();
  device_seconds_.push_back(seconds);
}

void LoadMeter::forget() {
  clear();
  settling_ = in_flight_max_;
}

void LoadMeter::clear() {
  steps_.clear();
  device_seconds_.clear();
  seen_s_ = 0;
}

bool LoadMeter::has_seen(size_t steps, double seconds) const {
  return steps_.size() >= steps && (seen_s_ >= seconds || steps_.size() == kStepsMax);
}

std::optional<MeasuredLoads> LoadMeter::measured(bool needs_boundary, uint32_t cpus) const {
  std::vector<double> work_s, fetch_s, prefix_s, bytes, whole_s;
  for (const Step& step : steps_) {
    if (needs_boundary && !step.batch.has_boundary) continue;
    work_s.push_back(step.work_s);
    fetch_s.push_back(step.batch.fetch_s);
    prefix_s.push_back(step.batch.prefix_s);
    bytes.push_back(step.batch.bytes);
    whole_s.push_back(step.work_s + step.wait_s);
  }
  if (whole_s.empty() || 2 * whole_s.size() < steps_.size()) return std::nullopt;
  const MiddleMean step = middle_mean(whole_s);
  double trainer_s = middle_mean(std::move(work_s)).mean;
  // The host runs ahead of its device, or vice versa: the slower one counts.
  if (!device_seconds_.empty())
    trainer_s = std::max(trainer_s, middle_mean({device_seconds_.begin(), device_seconds_.end()}).mean);
  return MeasuredLoads{.steps = whole_s.size(),
                       .workers = workers_,
                       .cpus = cpus,
                       .trainer_s = trainer_s,
                       .fetch_s = middle_mean(std::move(fetch_s)).mean,
                       .prefix_s = middle_mean(std::move(prefix_s)).mean,
                       .bytes = middle_mean(std::move(bytes)).mean,
                       .link = work_ ? work_->link : LinkRate{},
                       .step_s = step.mean,
                       .step_error_s = step.error};
}

}  // namespace penstock::graph
