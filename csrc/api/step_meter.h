// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures the steps of a loader for the modules offloaded to it: graph/load_meter.h, plus timing by events of the
// training device.

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "graph/load_meter.h"

namespace penstock::api {

// Thread-compatible: for the trainer's thread.
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

}  // namespace penstock::api
