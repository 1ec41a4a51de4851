// SPDX-License-Identifier: Apache-2.0
#include "api/step_meter.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

namespace penstock::api {
namespace {

// The number of spans that the device may be behind; further ones are not measured.
constexpr size_t kSpansMax = 64;

}  // namespace

void StepMeter::set_device(std::optional<c10::Device> device) {
  if (device == device_) return;
  device_ = device;
  begun_.reset();
  spans_.clear();
}

template <typename Work>
void StepMeter::on_device(const Work& work) {
  if (!device_) return;
  try {
    work();
  } catch (const c10::Error&) {
    set_device(std::nullopt);
  }
}

void StepMeter::begin(uint32_t workers, uint32_t in_flight_max) {
  has_begun_ = true;
  begun_.reset();
  loads_->begin(workers, in_flight_max);
}

c10::Event StepMeter::recorded() const {
  c10::Event event(device_->type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_));
  return event;
}

void StepMeter::note_call() {
  on_device([&] {
    if (begun_ && spans_.size() < kSpansMax) spans_.push_back({std::move(*begun_), recorded()});
    begun_.reset();
  });
}

void StepMeter::note(double called_at_s, double returned_at_s, const graph::DeliveredWork& work) {
  loads_->note(called_at_s, returned_at_s, work);
  on_device([&] {
    take_spans();
    begun_ = recorded();
  });
}

// Checks both events, since the program's current stream may differ between the start and the end of a span.
void StepMeter::take_spans() {
  for (; !spans_.empty() && spans_.front().begin.query() && spans_.front().end.query(); spans_.pop_front())
    loads_->note_device(spans_.front().begin.elapsedTime(spans_.front().end) * 1e-3);
}

}  // namespace penstock::api
