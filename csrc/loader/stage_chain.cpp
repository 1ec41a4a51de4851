// SPDX-License-Identifier: Apache-2.0
#include "loader/stage_chain.h"

#include <poll.h>

#include <chrono>
#include <string>
#include <utility>

#include "base/clock.h"
#include "loader/incoming_batch.h"

namespace penstock::loader {
namespace {

// The interval at which stages are asked for finished copies, while some are running.
constexpr std::chrono::milliseconds kReclaimInterval{1};

// Between two checks for finished copies and stale batches.
constexpr size_t kArrivalsPerTurn = 64;

bool has_tensors(const Batch& batch) {
  return !batch.record().raises() && !batch.record().remote_error() && !batch.record().frame().tensors.empty();
}

// Device memory during the widening: the narrow bytes and the widened ones.
uint64_t bytes_of(const Batch& batch) { return batch.record().bytes() + batch.record().wide_bytes(); }

std::unique_ptr<Batch> make_error(const Batch& batch, const Fault& error, uint64_t staged_bytes) {
  if (error.code != Errc::kNoMemory) {
    return Batch::from_error(batch.record().facts(),
                             {.type_name = "RuntimeError", .text = error.message, .worker = {}});
  }
  const std::string text = error.message + "\n" + std::to_string(staged_bytes) +
                           " bytes hold batches that were copied ahead. Use smaller batches, copy fewer ahead "
                           "(prefetch_bytes), or free device memory";
  return Batch::from_error(batch.record().facts(), {.type_name = "torch.OutOfMemoryError", .text = text, .worker = {}});
}

}  // namespace

StageChain::StageChain(Inbox& inbox, size_t arrival_count_max)
    : inbox_(inbox), waiting_count_max_(arrival_count_max), arrivals_(arrival_count_max) {}

StageChain::~StageChain() { stop(); }

Result<void> StageChain::start(Stages stages) {
  stages_ = std::move(stages);
  if (stages_.wide_bytes) wide_memory_.emplace(*stages_.wide_bytes);
  if (stages_.in_order.empty() && !stages_.tap && !wide_memory_) return {};
  takes_narrow_ = !stages_.tap && !stages_.in_order.empty() && stages_.in_order.front()->takes_narrow();
  loop_ = std::make_unique<EventLoop>("pk_stages", "which moves batches to their devices",
                                      static_cast<EventLoop::Handler&>(*this));
  for (const auto& stage : stages_.in_order) stage->set_waker(loop_->waker());
  return loop_->start();
}

void StageChain::close() {
  arrivals_.close();
  if (stages_.tap) stages_.tap->source_stopped();
}

void StageChain::stop() {
  close();
  if (loop_) loop_->stop();
  waiting_.clear();
  while (arrivals_.try_pop()) {
  }
  inbox_.clear();
  stages_.in_order.clear();
  stages_.tap.reset();
}

void StageChain::arrive(Arrival arrival) {
  if (arrival.batch) {
    BatchTimes& times = arrival.batch->record().times();
    times.arrived_at = times.staged_at = clock_now();
    if (times.worker_id == 0) times.worker_id = arrival.worker_id;
    if (times.made_at == Instant{}) times.made_at = times.arrived_at;
  }
  const bool is_news = arrival.kind == Arrival::Kind::kNews || arrival.kind == Arrival::Kind::kGrown;
  // If batches are only widened, a batch without narrow tensors need not wait for one that is being widened.
  const bool is_ready = arrival.batch && !arrival.narrow && stages_.in_order.empty() && !stages_.tap;
  if (!loop_ || is_news || is_ready) return inbox_.arrive(std::move(arrival));
  if (arrivals_.push(std::move(arrival))) loop_->wake();
}

void StageChain::fail(uint32_t worker_id, const Fault& error) {
  arrive({.kind = Arrival::Kind::kFailed, .worker_id = worker_id, .batch = {}, .error = error});
}

void StageChain::await(uint32_t epoch, std::optional<uint64_t> sequence) {
  if (!loop_ || stages_.staged_bytes_max == 0) return;
  loop_->post([this, epoch, sequence] { awaited_ = {.epoch = epoch, .sequence = sequence}; });
}

Result<void> StageChain::finish(Batch& batch) {
  Result<void> outcome;
  if (stages_.tap) {
    if (auto failure = stages_.tap->failure()) outcome = *std::move(failure);
  }
  for (const auto& stage : stages_.in_order) {
    if (outcome) outcome = stage->finish(batch);
  }
  batch.set_staged({});
  if (waiting_count_.load() > 0) loop_->wake();
  return outcome;
}

Result<void> StageChain::serve() {
  drop_stale();
  let_through();
  for (size_t count = 0; count < kArrivalsPerTurn && waiting_.size() < waiting_count_max_; ++count) {
    auto arrival = arrivals_.try_pop();
    if (!arrival) break;
    take(*std::move(arrival));
  }
  copy_count_ = 0;
  for (const auto& stage : stages_.in_order) copy_count_ += stage->reclaim();
  return {};
}

Result<bool> StageChain::wait(int wake_fd, bool may_sleep) {
  const bool has_arrivals = arrivals_.size() > 0 && waiting_.size() < waiting_count_max_;
  auto timeout = copy_count_ > 0 ? kReclaimInterval : std::chrono::milliseconds(-1);
  if (!may_sleep || has_arrivals || find_next()) timeout = std::chrono::milliseconds(0);
  pollfd waker{.fd = wake_fd, .events = POLLIN, .revents = 0};
  return ::poll(&waker, 1, static_cast<int>(timeout.count())) > 0;
}

void StageChain::failed(Fault error) {
  close();
  inbox_.fail(0, error);
}

// Widens the narrow tensors, unless a device does. A batch that cannot be widened becomes an error.
void StageChain::widen(Arrival& arrival, const NarrowArrival& narrow) {
  PENSTOCK_ASSERT(wide_memory_, "a compressed batch was received unexpectedly");
  Result<void> ready;
  const bool is_kept = takes_narrow_ && arrival.batch->tensors().try_keep_narrow();
  if (!is_kept) ready = arrival.batch->tensors().widen(*wide_memory_);
  BatchTimes times = arrival.batch->record().times();
  times.arrived_at = times.staged_at = clock_now();  // widening counts as link time: it saved bytes there
  const BatchKey key{.epoch = arrival.epoch, .sequence = arrival.sequence};
  if (!ready) arrival.batch = error_of_damage(key, narrow.place, ready.error());
  arrival.batch->record().times() = times;
}

void StageChain::take(Arrival arrival) {
  if (const auto narrow = std::exchange(arrival.narrow, std::nullopt)) {
    if (is_stale({.epoch = arrival.epoch, .sequence = arrival.sequence})) return inbox_.counters().stale_batches.add(1);
    widen(arrival, *narrow);
  }
  const bool is_of_stream = arrival.kind == Arrival::Kind::kBatch || arrival.kind == Arrival::Kind::kEnd;
  if (stages_.tap && is_of_stream) stages_.tap->arrived(arrival);
  const bool is_to_be_staged = arrival.kind == Arrival::Kind::kBatch && has_tensors(*arrival.batch);
  if (!is_to_be_staged || (stages_.in_order.empty() && !stages_.tap)) return inbox_.arrive(std::move(arrival));
  const BatchKey key{.epoch = arrival.epoch, .sequence = arrival.sequence};
  waiting_.emplace(key, Waiting{.arrival = std::move(arrival)});
  // Stored before the staged bytes are read: finish() accesses them in the opposite order, so one of the two sees the
  // other's change.
  waiting_count_.store(waiting_.size());
  let_through();
}

bool StageChain::is_stale(const BatchKey& key) const { return !wire::is_recall(key) && inbox_.is_stale(key.epoch); }

void StageChain::drop_stale() {
  const auto dropped_count = std::erase_if(waiting_, [&](const auto& entry) { return is_stale(entry.first); });
  if (dropped_count == 0) return;
  inbox_.counters().stale_batches.add(dropped_count);
  waiting_count_.store(waiting_.size());
}

void StageChain::let_through() {
  while (const auto next = find_next()) {
    // The room may result from the end of the batch's epoch. A dropped batch leaves the room to the next one.
    if (is_stale(next->place->first)) {
      drop_stale();
      continue;
    }
    if (next->is_awaited) awaited_.reset();
    if (!try_stage(next->place->second, next->is_awaited)) continue;
    Arrival arrival = std::move(next->place->second.arrival);
    arrival.batch->record().times().staged_at = clock_now();
    waiting_.erase(next->place);
    waiting_count_.store(waiting_.size());
    inbox_.arrive(std::move(arrival));
  }
}

std::optional<StageChain::Next> StageChain::find_next() {
  if (waiting_.empty()) return std::nullopt;
  if (awaited_) {
    const auto place = waiting_.lower_bound({.epoch = awaited_->epoch, .sequence = awaited_->sequence.value_or(0)});
    const bool is_found = place != waiting_.end() && place->first.epoch == awaited_->epoch &&
                          (!awaited_->sequence || place->first.sequence == *awaited_->sequence);
    if (is_found) return Next{.place = place, .is_awaited = true};
  }
  if (!has_room_for(*waiting_.begin()->second.arrival.batch)) return std::nullopt;
  return Next{.place = waiting_.begin(), .is_awaited = false};
}

bool StageChain::has_room_for(const Batch& batch) const {
  const uint64_t staged_bytes = staged_.value();
  if (full_at_ && staged_bytes >= *full_at_) return false;
  return stages_.staged_bytes_max == 0 || staged_bytes == 0 ||
         staged_bytes + bytes_of(batch) <= stages_.staged_bytes_max;
}

bool StageChain::try_stage(Waiting& waiting, bool is_awaited) {
  std::unique_ptr<Batch>& batch = waiting.arrival.batch;
  const uint64_t staged_bytes = staged_.value();
  for (; waiting.stage_index < stages_.in_order.size(); ++waiting.stage_index) {
    const auto begun = stages_.in_order[waiting.stage_index]->begin(*batch);
    if (begun) continue;
    const bool may_wait = !is_awaited && stages_.staged_bytes_max > 0;  // without a limit, await() is not recorded
    if (begun.error().code == Errc::kNoMemory && may_wait) {
      full_at_ = staged_bytes;
      return false;
    }
    const BatchTimes times = batch->record().times();
    batch = make_error(*batch, begun.error(), staged_bytes);
    batch->record().times() = times;
    return true;
  }
  full_at_.reset();
  batch->set_staged(staged_.take(bytes_of(*batch)));
  return true;
}

}  // namespace penstock::loader
