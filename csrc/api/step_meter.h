// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures the steps of a loader for the modules that are offloaded to it: graph/load_meter.h, with the clock of the
// device that trains.

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
  // What the device does between two deliveries is timed by its own events from now on.
  // None: by the host's clock, which is also taken where the device does not time its events.
  void set_device(std::optional<c10::Device> device);

  void begin(uint32_t workers, uint32_t in_flight_max);
  bool has_begun() const { return has_begun_; }
  // next() is called: the program has started all of its work on the batch before.
  void note_call();
  // A batch was delivered for a call of next() that lasted from then until then.
  void note(double called_at_s, double returned_at_s, const graph::DeliveredWork& work);

 private:
  struct Span {
    c10::Event begin;
    c10::Event end;
  };

  c10::Event recorded() const;
  void take_spans();
  // Runs what speaks to the device, and does without it where that fails.
  template <typename Work>
  void on_device(const Work& work);

  const std::shared_ptr<graph::LoadMeter> loads_ = std::make_shared<graph::LoadMeter>();
  bool has_begun_ = false;
  std::optional<c10::Device> device_;
  std::optional<c10::Event> begun_;  // the span that goes on
  std::deque<Span> spans_;           // of which the device may not have come to the end
};

}  // namespace penstock::api
