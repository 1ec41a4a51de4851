// SPDX-License-Identifier: Apache-2.0
#pragma once
// Has the plans of an offloaded module priced again while its loader runs. When a plan changes is decided in
// graph/repricer.h; here calls are timed. It is what python/penstock/cut/repricing.py does for Python's programs.

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>

#include "api/step_meter.h"
#include "graph/repricer.h"

namespace penstock::api {

// Thread-compatible: for the trainer's thread.
class ScriptPricing {
 public:
  using Cut = graph::Repricer::Cut;
  using Run = std::function<c10::IValue()>;

  explicit ScriptPricing(std::shared_ptr<StepMeter> meter);

  // The module is on that device, or on the CPU.
  void set_device(std::optional<c10::Device> device);
  // Something was planned or compared in this step.
  void note_odd_step() { meter_->loads()->skip(); }
  // Runs the suffix, or the whole in its place, and may time it.
  c10::IValue run(const Cut& cut, const Run& whole, const Run& suffix);
  // To be called for each call of a cut: the change of its plan, if another promises to be better, or has been.
  std::optional<graph::Repricer::Change> look_at(const Cut& cut, bool is_elsewhere);
  void changed(const Cut& old_cut, const Cut& new_cut) { repricer_.changed(old_cut, new_cut); }
  void give_up(const Cut& cut) { repricer_.give_up(cut); }

 private:
  double seconds_of(const Run& run, c10::IValue& result);

  const std::shared_ptr<StepMeter> meter_;
  std::optional<c10::Device> device_;  // none too where it does not time its events
  graph::Repricer repricer_;
};

}  // namespace penstock::api
