// SPDX-License-Identifier: Apache-2.0
#include "api/step_meter.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <utility>

#include "api/surroundings.h"

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

namespace {

constexpr uint32_t kEnoughCpus = 1 << 20;  // for any number of workers on other machines

}  // namespace

ScriptPricing::ScriptPricing(std::shared_ptr<StepMeter> meter) : meter_(std::move(meter)), repricer_(meter_->loads()) {}

void ScriptPricing::set_device(std::optional<c10::Device> device) {
  device_ = device;
  meter_->set_device(device);
}

// Waits for the device, which is acceptable for a few calls of each plan.
double ScriptPricing::seconds_of(const Run& run, c10::IValue& result) {
  const auto start = std::chrono::steady_clock::now();
  std::optional<c10::Event> begin;
  std::optional<c10::Stream> stream;
  try {
    if (device_) {
      stream = c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_);
      begin.emplace(device_->type(), c10::EventFlag::BACKEND_DEFAULT);
      begin->record(*stream);
    }
  } catch (const c10::Error&) {
    device_.reset();
  }
  result = run();
  const double host_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!device_) return host_s;
  try {
    c10::Event end(device_->type(), c10::EventFlag::BACKEND_DEFAULT);
    end.record(*stream);
    end.synchronize();
    return begin->elapsedTime(end) * 1e-3;
  } catch (const c10::Error&) {
    device_.reset();
    return host_s;
  }
}

c10::IValue ScriptPricing::run(const Cut& cut, const Run& whole, const Run& suffix) {
  if (!cut || !cut->pricing->wants_timed_calls()) return suffix();
  const auto timed = cut->pricing->next_timed_call();
  if (!timed) return suffix();
  note_atypical_step();
  c10::IValue result;
  cut->pricing->note(*timed, seconds_of(*timed == graph::TimedCall::kWhole ? whole : suffix, result));
  // Timing slowed the trainer down, and workers got ahead.
  if (!cut->pricing->wants_timed_calls()) meter_->loads()->forget();
  return result;
}

std::optional<graph::Repricer::Change> ScriptPricing::look_at(const Cut& cut, bool is_elsewhere) {
  if (!cut) return std::nullopt;
  repricer_.note_call(cut, 1);
  if (repricer_.is_window_due()) static_cast<void>(repricer_.take_window(is_elsewhere ? kEnoughCpus : usable_cpus()));
  return repricer_.change_of(cut);
}

}  // namespace penstock::api
