// SPDX-License-Identifier: Apache-2.0
#pragma once
// Prices the plans of an offloaded module again while its loader runs. graph/repricer.h decides when a plan changes;
// this class times the calls. The counterpart for Python programs is python/penstock/cut/repricing.py.

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

  // The device of the module; none for the CPU.
  void set_device(std::optional<c10::Device> device);
  // Excludes this step from the measurements, because it included planning or a comparison.
  void note_odd_step() { meter_->loads()->skip(); }
  // Runs the suffix, or instead the whole module, and may time it.
  c10::IValue run(const Cut& cut, const Run& whole, const Run& suffix);
  // Call for each call of a cut. Returns a change of plan if another plan is predicted to be, or has been, faster.
  std::optional<graph::Repricer::Change> look_at(const Cut& cut, bool is_elsewhere);
  void changed(const Cut& old_cut, const Cut& new_cut) { repricer_.changed(old_cut, new_cut); }
  void give_up(const Cut& cut) { repricer_.give_up(cut); }

 private:
  double seconds_of(const Run& run, c10::IValue& result);

  const std::shared_ptr<StepMeter> meter_;
  std::optional<c10::Device> device_;  // also none if its events cannot measure time
  graph::Repricer repricer_;
};

}  // namespace penstock::api
