// SPDX-License-Identifier: Apache-2.0
#include "simulator/trainer_meter.h"

#include <algorithm>
#include <cmath>

namespace penstock::simulator {
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
