// SPDX-License-Identifier: Apache-2.0
#include "loader/inbox.h"

#include <utility>

#include "wire/message.h"

namespace penstock::loader {
namespace {

// News about workers is relevant in every epoch.
bool is_of_an_epoch(const Arrival& arrival) {
  return arrival.kind == Arrival::Kind::kBatch || arrival.kind == Arrival::Kind::kEnd;
}

}  // namespace

void Inbox::fail(uint32_t worker_id, const Fault& error) {
  arrive({.kind = Arrival::Kind::kFailed, .worker_id = worker_id, .batch = {}, .error = error});
}

void Inbox::arrive(Arrival arrival) {
  if (arrival.kind == Arrival::Kind::kFailed) is_dead_.store(true);
  if (arrival.kind == Arrival::Kind::kBatch && (arrival.sequence & wire::kRecallBit) != 0) {
    static_cast<void>(recalled_.try_push(arrival.batch));  // dropped if full: more recalled batches are not awaited
    return;
  }
  if (arrival.kind == Arrival::Kind::kGrown && is_growth_queued_.exchange(true)) return;
  if (arrival.kind == Arrival::Kind::kNews) {
    const size_t waiting_count = news_count_.load();
    if (waiting_count == kNewsCountMax) return;
    if (waiting_count + 1 == kNewsCountMax) {
      arrival.error->message = "the pool sent more than " + std::to_string(kNewsCountMax) +
                               " messages, and the remaining ones were dropped; run penstock status";
    }
    news_count_.fetch_add(1);
  }
  static_cast<void>(arrivals_.push(std::move(arrival)));
}

std::optional<Arrival> Inbox::try_pop() {
  auto arrival = try_take();
  if (arrival && arrival->kind == Arrival::Kind::kNews) news_count_.fetch_sub(1);
  if (arrival && arrival->kind == Arrival::Kind::kGrown) is_growth_queued_.store(false);
  return arrival;
}

std::optional<Arrival> Inbox::try_take() {
  if (kept_.empty()) return arrivals_.try_pop();
  std::optional<Arrival> arrival = std::move(kept_.front());
  kept_.pop_front();
  return arrival;
}

void Inbox::set_epochs(uint32_t first, uint32_t last) {
  last_epoch_.store(last);
  first_epoch_.store(first);
  drop_stale();
}

void Inbox::drop_stale() {
  std::deque<Arrival> kept;
  while (auto arrival = try_take()) {
    if (!is_of_an_epoch(*arrival) || !is_stale(arrival->epoch)) {
      kept.push_back(std::move(*arrival));
    } else if (arrival->kind == Arrival::Kind::kBatch) {
      counters_.stale_batches.add(1);
    }
  }
  kept_ = std::move(kept);
}

void Inbox::clear() {
  while (try_pop()) {
  }
  while (try_recalled()) {
  }
}

}  // namespace penstock::loader
