// SPDX-License-Identifier: Apache-2.0
#pragma once
// A StepMeter measures the steps of a loader for the modules offloaded to it; ScriptPricing prices the plans of such a
// module again. The counterpart for Python programs is python/penstock/cut/repricing.py.

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "graph/load_meter.h"
#include "graph/repricer.h"

namespace penstock::api {

// graph/load_meter.h, plus timing by events of the training device. Thread-compatible: for the trainer's thread.
class StepMeter {
 public:
  const std::shared_ptr<graph::LoadMeter>& loads() const { return loads_; }
  // From now on, device work between two deliveries is timed by device events. None: by the host's clock, which is also
  // used if the device's events cannot measure time.
  void set_device(std::optional<c10::Device> device);

  void begin(uint32_t workers, uint32_t in_flight_max);
  bool has_begun() const { return has_begun_; }
  // Call when next() is called: the program has submitted all of its work on the previous batch.
  void note_call();
  // A batch was delivered by a call of next() that lasted from `called_at_s` to `returned_at_s`.
  void note(double called_at_s, double returned_at_s, const graph::DeliveredWork& work);

 private:
  struct Span {
    c10::Event begin;
    c10::Event end;
  };

  c10::Event recorded() const;
  void take_spans();
  // Runs `work`, which uses the device; if it fails, stops using the device.
  template <typename Work>
  void on_device(const Work& work);

  const std::shared_ptr<graph::LoadMeter> loads_ = std::make_shared<graph::LoadMeter>();
  bool has_begun_ = false;
  std::optional<c10::Device> device_;
  std::optional<c10::Event> begun_;  // the start of the current span
  std::deque<Span> spans_;           // the device may not have reached their ends
};

// Prices the plans of an offloaded module again while its loader runs. graph/repricer.h decides when a plan changes;
// this class times the calls. Thread-compatible: for the trainer's thread.
class ScriptPricing {
 public:
  using Cut = graph::Repricer::Cut;
  using Run = std::function<c10::IValue()>;

  explicit ScriptPricing(std::shared_ptr<StepMeter> meter);

  // The device of the module; none for the CPU.
  void set_device(std::optional<c10::Device> device);
  // Excludes this step from the measurements, because it included planning or a comparison.
  void note_atypical_step() { meter_->loads()->skip(); }
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
