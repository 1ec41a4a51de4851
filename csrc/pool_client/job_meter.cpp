// SPDX-License-Identifier: Apache-2.0
#include "pool_client/job_meter.h"

namespace penstock::pool_client {

void JobMeter::note_message(uint64_t worker_id, const wire::PoolAnswer& answer, Instant now) {
  if (answer.message.kind == wire::ToTrainer::Kind::kWelcome) {
    workers_.welcomed(worker_id, answer.meter, /*is_continued=*/!answer.message.is_fresh, now);
  } else {
    workers_.heard(worker_id, answer.meter, now);
  }
  board_.set(workers_.totals());
}

void JobMeter::note_batch(const wire::PoolAnswer& answer) {
  workers_.came({.sample_count = answer.sample_count, .bytes = answer.payload_bytes});
  board_.set(workers_.totals());
}

void JobMeter::note_parting(uint64_t worker_id, Instant now) {
  workers_.parted(worker_id, now);
  board_.set(workers_.totals());
}

}  // namespace penstock::pool_client
