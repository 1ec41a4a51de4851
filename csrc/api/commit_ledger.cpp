// SPDX-License-Identifier: Apache-2.0
#include "api/commit_ledger.h"

#include <algorithm>
#include <span>
#include <utility>

#include "api/exceptions.h"
#include "base/result.h"

namespace penstock::api {

PlacesLeft PlacesLeft::after(uint64_t count) const {
  const auto asked = std::min<uint64_t>(count, missing.size());
  return {through + (count - asked), {missing.begin() + static_cast<ptrdiff_t>(asked), missing.end()}};
}

void DeliveredPlaces::note(uint64_t place) {
  for (; through_ <= place; ++through_) missing_.insert(through_);
  missing_.erase(place);
}

PlacesLeft EarlierEpoch::left() const {
  PENSTOCK_ASSERT(!batches.empty(), "epoch ", number, " has no outstanding batch");
  PlacesLeft left{.through = batches.rbegin()->first + 1};
  for (const auto& [place, batch] : batches) left.missing.push_back(place);
  return left;
}

namespace {

// As Python shows a BatchId.
std::string to_text(const BatchId& id) {
  return "BatchId(epoch=" + std::to_string(id.epoch) + ", batch=" + std::to_string(id.batch) + ")";
}

void finish(OpenEpoch& epoch, uint64_t place) {
  epoch.outstanding.erase(place);
  epoch.pulled.erase(place);
  epoch.places.note(place);
}

// The epoch is over: keeps the data of its outstanding batches, and of no others.
void keep_outstanding(OpenEpoch& epoch) {
  std::map<uint64_t, PulledBatch> kept;
  for (const uint64_t place : epoch.outstanding)
    kept.emplace(place, epoch.pull_again ? epoch.pull_again(place) : std::move(epoch.pulled.at(place)));
  epoch.pulled = std::move(kept);
  epoch.pull_again = nullptr;
}

}  // namespace

// ---- The stream

std::shared_ptr<OpenEpoch> CommitLedger::begin_epoch(const PlacesLeft& left, int64_t seed_epoch, int64_t base_seed,
                                                     std::function<PulledBatch(uint64_t place)> pull_again) {
  MutexLock lock(mutex_);
  archive();
  newest_ = std::make_shared<OpenEpoch>(OpenEpoch{.number = next_number_++,
                                                  .seed_epoch = seed_epoch,
                                                  .base_seed = base_seed,
                                                  .places = DeliveredPlaces(left),
                                                  .pull_again = std::move(pull_again)});
  return newest_;
}

void CommitLedger::archive() {
  const auto epoch = std::exchange(newest_, nullptr);
  if (!epoch || epoch->outstanding.empty()) return;
  keep_outstanding(*epoch);
  earlier_.emplace(epoch->number, epoch);
}

void CommitLedger::note_pull(OpenEpoch& epoch, uint64_t place, PulledBatch batch) {
  MutexLock lock(mutex_);
  epoch.pulled.emplace(place, std::move(batch));
}

std::shared_ptr<const CommitMark> CommitLedger::deliver(OpenEpoch& epoch, uint64_t place) {
  MutexLock lock(mutex_);
  epoch.outstanding.insert(place);
  return std::make_shared<const CommitMark>(
      CommitMark{.ledger = weak_from_this(),
                 .generation = generation_,
                 .id = {.epoch = epoch.number, .batch = static_cast<int64_t>(place)}});
}

PlacesLeft CommitLedger::left(const OpenEpoch& epoch) const {
  MutexLock lock(mutex_);
  return epoch.places.left();
}

bool CommitLedger::has_repeats() const {
  MutexLock lock(mutex_);
  return !to_repeat_.empty();
}

CommitLedger::Repeat CommitLedger::take_repeat() {
  MutexLock lock(mutex_);
  const auto epoch = to_repeat_.front();
  to_repeat_.pop_front();
  return {.epoch = epoch,
          .content = {.number = epoch->number,
                      .seed_epoch = epoch->seed_epoch,
                      .base_seed = epoch->base_seed,
                      .batches = epoch->pulled}};
}

// ---- The program

std::vector<BatchId> CommitLedger::outstanding() const {
  MutexLock lock(mutex_);
  std::vector<BatchId> ids;
  const auto list = [&](const OpenEpoch& epoch) {
    for (const uint64_t place : epoch.outstanding) ids.push_back({epoch.number, static_cast<int64_t>(place)});
  };
  for (const auto& [number, epoch] : earlier_) list(*epoch);
  if (newest_) list(*newest_);
  return ids;
}

void CommitLedger::commit(const BatchId& id) {
  MutexLock lock(mutex_);
  commit_locked(id);
}

void CommitLedger::commit(const CommitMark* mark) {
  const auto owner = mark != nullptr ? mark->ledger.lock() : nullptr;
  if (!owner) {
    refuse("the batch must be one that " + title_ +
           " delivered, got a Batch that it did not deliver; pass the batch as next() returned it, or its id()");
  }
  if (owner.get() != this) {
    refuse("the batch was delivered by the loader " + owner->title_ + ", not by " + title_ +
           "; commit it to the loader that delivered it");
  }
  MutexLock lock(mutex_);
  if (mark->generation != generation_) {
    refuse("batch " + to_text(mark->id) +
           " was delivered before load_state(), which began another stream; commit the batches that were delivered "
           "since");
  }
  commit_locked(mark->id);
}

void CommitLedger::commit_locked(const BatchId& id) {
  OpenEpoch* const epoch = find(id.epoch);
  const auto place = static_cast<uint64_t>(id.batch);
  if (epoch == nullptr || id.batch < 0 || !epoch->outstanding.contains(place)) refuse(explain(id, epoch));
  finish(*epoch, place);
  if (epoch != newest_.get() && epoch->pulled.empty()) earlier_.erase(id.epoch);
}

OpenEpoch* CommitLedger::find(int64_t number) const {
  if (newest_ && newest_->number == number) return newest_.get();
  const auto found = earlier_.find(number);
  return found == earlier_.end() ? nullptr : found->second.get();
}

// Why a batch is not outstanding.
std::string CommitLedger::explain(const BatchId& id, const OpenEpoch* epoch) const {
  const bool is_left = epoch != nullptr ? id.batch < 0 || epoch->places.is_left(static_cast<uint64_t>(id.batch))
                                        : id.epoch >= next_number_;
  if (is_left) {
    return to_text(id) +
           " must be a batch that was delivered, and not since this loader or its state was made; commit it after "
           "next() has returned it";
  }
  return to_text(id) + " is committed already; commit each batch once";
}

// ---- The state

Value CommitLedger::to_state(bool is_between) {
  MutexLock lock(mutex_);
  Value::Items epochs;
  for (const auto& [number, epoch] : earlier_) epochs.push_back(to_value(*epoch));
  if (newest_ && is_between && !newest_->outstanding.empty()) {
    keep_outstanding(*newest_);
    epochs.push_back(to_value(*newest_));
  }
  const int64_t number = newest_ && !is_between ? newest_->number : next_number_;
  return Value::dict({{"epoch", number}, {"earlier", Value::list(std::move(epochs))}});
}

Value CommitLedger::to_value(const OpenEpoch& epoch) const {
  Value::Items batches;
  for (const auto& [place, batch] : epoch.pulled) {
    Value::Items indices(batch.indices.begin(), batch.indices.end());
    batches.push_back(Value::list(
        {place, batch.first_place, is_single_ ? std::move(indices.front()) : Value::list(std::move(indices))}));
  }
  return Value::dict({{"epoch", epoch.number},
                      {"seed_epoch", epoch.seed_epoch},
                      {"base_seed", epoch.base_seed},
                      {"batches", Value::list(std::move(batches))}});
}

void CommitLedger::load(CommitsState state) {
  MutexLock lock(mutex_);
  ++generation_;
  newest_ = nullptr;
  earlier_.clear();
  to_repeat_.clear();
  next_number_ = state.next_number;
  for (EarlierEpoch& loaded : state.earlier) {
    const auto epoch = std::make_shared<OpenEpoch>(OpenEpoch{.number = loaded.number,
                                                             .seed_epoch = loaded.seed_epoch,
                                                             .base_seed = loaded.base_seed,
                                                             .places = DeliveredPlaces(loaded.left()),
                                                             .pulled = std::move(loaded.batches)});
    earlier_.emplace(epoch->number, epoch);
    to_repeat_.push_back(epoch);
  }
}

// ---- Orders

RecordedOrder::RecordedOrder(std::unique_ptr<loader::IndexSource> order, std::shared_ptr<CommitLedger> ledger,
                             std::shared_ptr<OpenEpoch> epoch, PlacesLeft left,
                             std::function<PulledBatch()> step_of_ranks)
    : order_(std::move(order)),
      ledger_(std::move(ledger)),
      epoch_(std::move(epoch)),
      left_(std::move(left)),
      step_of_ranks_(std::move(step_of_ranks)) {}

std::optional<loader::IndexSource::Indices> RecordedOrder::next() {
  auto indices = order_->next();
  if (!indices) return indices;
  const uint64_t number = pull_count_++;
  const uint64_t missing_count = left_.missing.size();
  const uint64_t place = number < missing_count ? left_.missing[number] : left_.through + (number - missing_count);
  ledger_->note_pull(*epoch_, place, step_of_ranks_ ? step_of_ranks_() : pulled_of(*indices));
  return indices;
}

std::optional<loader::IndexSource::Indices> RepeatedOrder::next() {
  if (next_ == batches_.end()) return std::nullopt;
  const PulledBatch& batch = next_++->second;
  return Indices{.kind = kind_, .body = std::as_bytes(std::span(batch.indices)), .first_place = batch.first_place};
}

PulledBatch pulled_of(const loader::IndexSource::Indices& indices) {
  PulledBatch batch{.indices = std::vector<int64_t>(indices.body.size() / sizeof(int64_t)),
                    .first_place = indices.first_place};
  std::copy(indices.body.begin(), indices.body.end(), std::as_writable_bytes(std::span(batch.indices)).begin());
  return batch;
}

}  // namespace penstock::api
