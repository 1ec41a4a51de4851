// SPDX-License-Identifier: Apache-2.0
#include "costs/cost_meter.h"

#include <algorithm>
#include <limits>

#include "session/worker_session.h"

namespace penstock::costs {
namespace {

// Above the capacity of any machine.
constexpr uint64_t kCpusMax = 4096;
constexpr uint64_t kWattsMax = 100'000;
constexpr Duration kMeterSlack = std::chrono::seconds(60);  // for messages that were delayed
constexpr Duration kMeteredMax = std::chrono::hours(24 * 30);
static_assert(static_cast<uint64_t>(kMeteredMax.count()) < std::numeric_limits<uint64_t>::max() / kCpusMax);

uint64_t nanoseconds(Duration time) { return static_cast<uint64_t>(std::max<int64_t>(0, time.count())); }

// The part of a worker's reported consumption since its last message that keeps its tenancy below `most`.
uint64_t believed(uint64_t said, uint64_t most, uint64_t& spent) {
  const uint64_t counted = std::min(said, most - std::min(most, spent));
  spent += counted;
  return counted;
}

}  // namespace

void CostMeter::welcomed(uint64_t worker_id, const wire::WorkerMeter& meter, bool is_continued, Instant now) {
  const auto known = tenancies_.find(worker_id);
  if (known != tenancies_.end() && is_continued) return advance(known->second, meter, now);
  ++totals_.tenancy_count;
  if (meter.has_energy()) ++totals_.metered_tenancy_count;
  tenancies_[worker_id] = {.begun_at = now, .meter = meter, .heard_at = now, .is_metered = meter.has_energy()};
}

void CostMeter::heard(uint64_t worker_id, const wire::WorkerMeter& meter, Instant now) {
  const auto known = tenancies_.find(worker_id);
  if (known != tenancies_.end()) advance(known->second, meter, now);
}

// The end of a dead worker is noticed late: it served at most until its lease with the trainer expired.
void CostMeter::parted(uint64_t worker_id, Instant now) {
  const auto known = tenancies_.find(worker_id);
  if (known == tenancies_.end()) return;
  totals_.served_ns += nanoseconds(std::min<Duration>(now - known->second.heard_at, session::kLease));
  tenancies_.erase(known);
}

void CostMeter::came(const Batch& batch) {
  ++totals_.batch_count;
  totals_.sample_count += batch.sample_count;
  totals_.batch_bytes += batch.bytes;
}

// A meter that runs backwards is forged, and is not added.
void CostMeter::advance(Tenancy& tenancy, const wire::WorkerMeter& meter, Instant now) {
  const uint64_t time_ns = nanoseconds(std::min<Duration>(now - tenancy.begun_at + kMeterSlack, kMeteredMax));
  totals_.served_ns += nanoseconds(now - tenancy.heard_at);
  if (meter.cpu_ns > tenancy.meter.cpu_ns)
    totals_.cpu_ns += believed(meter.cpu_ns - tenancy.meter.cpu_ns, time_ns * kCpusMax, tenancy.cpu_ns);
  if (tenancy.is_metered && !meter.has_energy()) {
    tenancy.is_metered = false;
    --totals_.metered_tenancy_count;
  } else if (tenancy.is_metered && meter.energy_uj > tenancy.meter.energy_uj) {
    totals_.energy_uj +=
        believed(meter.energy_uj - tenancy.meter.energy_uj, time_ns / 1000 * kWattsMax, tenancy.energy_uj);
  }
  tenancy.meter = meter;
  tenancy.heard_at = now;
}

}  // namespace penstock::costs
