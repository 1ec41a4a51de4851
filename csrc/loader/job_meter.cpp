// SPDX-License-Identifier: Apache-2.0
#include "loader/job_meter.h"

#include <chrono>
#include <utility>

namespace penstock::loader {

void JobMeter::open_gpu(const std::string& uuid, const std::string& library) {
  opening_ = std::async(std::launch::async, &GpuEnergy::open, uuid, library);
}

wire::GpuMeter JobMeter::read_gpu() {
  const bool is_first = opening_.valid() && opening_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  if (is_first) {
    if (auto opened = opening_.get()) gpu_ = std::move(opened).value();
  }
  if (!gpu_) return gpu_meter_;
  const auto now_uj = gpu_->read();
  gpu_meter_.now_uj = now_uj ? now_uj.value() : wire::kUnknownEnergy;
  if (is_first) gpu_meter_.begin_uj = gpu_meter_.now_uj;
  if (!now_uj) gpu_.reset();
  return gpu_meter_;
}

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

}  // namespace penstock::loader
