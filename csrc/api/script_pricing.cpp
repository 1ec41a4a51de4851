// SPDX-License-Identifier: Apache-2.0
#include "api/script_pricing.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <utility>

#include "api/usable_cpus.h"

namespace penstock::api {
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
  note_odd_step();
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
