// SPDX-License-Identifier: Apache-2.0
#include "loader/inbox.h"

#include <utility>

namespace penstock::loader {
namespace {

// News of workers matter in every epoch.
bool is_of_an_epoch(const Arrival& arrival) {
  return arrival.kind == Arrival::Kind::kBatch || arrival.kind == Arrival::Kind::kEnd;
}

}  // namespace

void Inbox::fail(uint32_t worker_id, const Error& error) {
  arrive({.kind = Arrival::Kind::kFailed, .worker_id = worker_id, .batch = {}, .error = error});
}

std::optional<Arrival> Inbox::try_pop() {
  if (kept_.empty()) return arrivals_.try_pop();
  std::optional<Arrival> arrival = std::move(kept_.front());
  kept_.pop_front();
  return arrival;
}

void Inbox::set_epochs(uint32_t first, uint32_t last) {
  last_epoch_.store(last);
  first_epoch_.store(first);
  std::deque<Arrival> kept;
  while (auto arrival = try_pop()) {
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
}

}  // namespace penstock::loader
