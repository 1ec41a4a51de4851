// SPDX-License-Identifier: Apache-2.0
#include "loader/step_ledger.h"

#include <algorithm>
#include <utility>

namespace penstock::loader {
namespace {

// Waits with less than this between them count as one: a long wait consists of short ones, so that signals are handled.
constexpr Duration kSameWait = std::chrono::milliseconds(1);

Duration overlap(Instant begin, Instant end, Instant from, Instant to) {
  return std::max(Duration(0), std::min(end, to) - std::max(begin, from));
}

uint64_t count_of(Duration time) { return static_cast<uint64_t>(std::max(Duration(0), time).count()); }

}  // namespace

// ---- The program's calls

void StepLedger::begin_stream() {
  const MutexLock lock(mutex_);
  workers_.clear();
  slow_samples_.clear();
}

void StepLedger::begin_epoch(Instant now) {
  left_at_ = now;
  entered_at_.reset();
  waits_.clear();
}

void StepLedger::enter(Instant now) {
  if (left_at_) counters_.compute_ns.add(count_of(now - *left_at_));
  left_at_.reset();
  entered_at_ = now;
  waited_ = shared_ = Duration(0);
  has_batch_ = false;
  waits_.clear();
  ranks_.reset();
}

void StepLedger::leave(Instant now) {
  if (!entered_at_) return;
  if (ranks_) end_ranks(now);
  // These waits ended without a batch: the dataset was exhausted, or the call gave up waiting for a worker.
  for (const Window& wait : waits_) {
    add(kWorker, wait.end - wait.begin);
    shared_ += wait.end - wait.begin;
  }
  waits_.clear();
  counters_.loader_ns.add(count_of(now - *entered_at_ - shared_));
  if (has_batch_) {
    counters_.steps.add(1);
    const MutexLock lock(mutex_);
    if (!records_.empty() && records_.back().given_at == Instant{}) records_.back().given_at = now;
  }
  entered_at_.reset();
  left_at_ = now;
}

void StepLedger::note_wait(Instant begin, Instant end) {
  if (!entered_at_ || end <= begin) return;
  if (!waits_.empty() && begin - waits_.back().end < kSameWait) {
    begin = waits_.back().end;
    waits_.back().end = end;
  } else {
    waits_.push_back({.begin = begin, .end = end});
  }
  waited_ += end - begin;
}

void StepLedger::begin_ranks(Instant now) {
  ranks_ = {.begin = now};
  waited_before_ranks_ = waited_;
}

void StepLedger::end_ranks(Instant now) {
  if (!ranks_) return;
  const Duration time = std::max(Duration(0), now - ranks_->begin - (waited_ - waited_before_ranks_));
  counters_.ranks_ns.add(count_of(time));
  shared_ += time;
  ranks_.reset();
}

// ---- Batches

Duration StepLedger::share_out(const Delivery& delivery) {
  const MakingTimes& making = delivery.making;
  const Instant begun_at = delivery.times.made_at - making.whole();
  const Instant from = Instant::min(), to = Instant::max();
  const std::array<std::pair<Place, Instant>, 6> ends{{{kWorker, begun_at},
                                                       {kDataset, begun_at + making.dataset},
                                                       {kCollate, begun_at + making.dataset + making.collate},
                                                       {kPrefix, delivery.times.made_at},
                                                       {kWire, delivery.times.arrived_at},
                                                       {kDevice, delivery.times.staged_at}}};
  Duration whole{0};
  for (const Window& wait : waits_) {
    const Instant order_from = std::clamp(delivery.later_ready_at.value_or(to), wait.begin, wait.end);
    add(kOrder, wait.end - order_from);
    whole += wait.end - order_from;
    Instant since = from;
    for (const auto& [place, until] : ends) {
      if (until <= since) continue;
      const Duration time = overlap(wait.begin, order_from, since, until);
      add(place, time);
      whole += time;
      since = until;
    }
  }
  return whole;
}

void StepLedger::add(Place place, Duration time) { counters_.waited_ns[place].add(count_of(time)); }

// Limits a worker's reported times to the interval that the trainer observed: from the request to the arrival.
StepLedger::Delivery StepLedger::bounded(Delivery delivery) {
  BatchTimes& times = delivery.times;
  if (times.asked_at == Instant{} || times.arrived_at < times.asked_at) return delivery;
  times.made_at = std::clamp(times.made_at, times.asked_at, times.arrived_at);
  Duration left = times.arrived_at - times.asked_at;
  for (Duration* part : {&delivery.making.dataset, &delivery.making.collate, &delivery.making.prefix}) {
    *part = std::clamp(*part, Duration(0), left);
    left -= *part;
  }
  return delivery;
}

void StepLedger::deliver(const Delivery& said) {
  const Delivery delivery = bounded(said);
  const Duration waited = share_out(delivery);
  shared_ += waited;
  waits_.clear();
  has_batch_ = true;
  const Duration on_wire = std::max(Duration(0), delivery.times.arrived_at - delivery.times.made_at);
  counters_.dataset_ns.add(count_of(delivery.making.dataset));
  counters_.collate_ns.add(count_of(delivery.making.collate));
  counters_.wire_ns.add(count_of(on_wire));
  const MutexLock lock(mutex_);
  if (workers_.size() < kLedgerWorkerCountMax || workers_.contains(delivery.times.worker_id)) {
    WorkerTotals& worker = workers_[delivery.times.worker_id];
    ++worker.batch_count;
    worker.making.dataset += delivery.making.dataset;
    worker.making.collate += delivery.making.collate;
    worker.making.prefix += delivery.making.prefix;
    worker.on_wire += on_wire;
    worker.waited += waited;
  }
  if (records_.size() < record_count_max_)
    records_.push_back({.epoch = delivery.epoch,
                        .sequence = delivery.sequence,
                        .times = delivery.times,
                        .making = delivery.making,
                        .entered_at = entered_at_.value_or(Instant{}),
                        .given_at = {},
                        .bytes = delivery.bytes});
}

bool StepLedger::is_slow(Duration time) const {
  const MutexLock lock(mutex_);
  return time > Duration(0) && (slow_samples_.size() < kSlowSampleCountMax || time > slow_samples_.back().time);
}

void StepLedger::note_slow_sample(const SlowSample& sample) {
  const MutexLock lock(mutex_);
  const auto place = std::ranges::upper_bound(slow_samples_, sample.time, std::greater<>{}, &SlowSample::time);
  slow_samples_.insert(place, sample);
  if (slow_samples_.size() > kSlowSampleCountMax) slow_samples_.pop_back();
}

// ---- Results

wire::StepTotals StepLedger::totals(const LoaderCounters& counters) {
  const auto& waited = counters.waited_ns;
  return {.step_count = counters.steps.value(),
          .compute_ns = counters.compute_ns.value(),
          .dataset_ns = waited[kDataset].value(),
          .collate_ns = waited[kCollate].value(),
          .prefix_ns = waited[kPrefix].value(),
          .worker_ns = waited[kWorker].value(),
          .wire_ns = waited[kWire].value(),
          .device_ns = waited[kDevice].value(),
          .order_ns = waited[kOrder].value(),
          .ranks_ns = counters.ranks_ns.value(),
          .loader_ns = counters.loader_ns.value()};
}

std::map<uint64_t, WorkerTotals> StepLedger::workers() const {
  const MutexLock lock(mutex_);
  return workers_;
}

std::vector<SlowSample> StepLedger::slow_samples() const {
  const MutexLock lock(mutex_);
  return slow_samples_;
}

void StepLedger::record(size_t count_max) {
  const MutexLock lock(mutex_);
  records_.clear();
  record_count_max_ = count_max;
}

std::vector<StepRecord> StepLedger::take_records() {
  const MutexLock lock(mutex_);
  return std::exchange(records_, {});
}

}  // namespace penstock::loader
