// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a cut costs. Calibration measures one batch; prices turn its seconds and bytes into one currency, integer
// picoseconds of the trainer's time per batch, so that the cheapest cut is exact and the same on every machine.

#include <cstdint>
#include <limits>
#include <vector>

#include "base/result.h"

namespace penstock::graph {

struct ValueSize {
  static constexpr uint32_t kNoStorage = std::numeric_limits<uint32_t>::max();

  int64_t bytes = 0;              // of a tensor's elements; 0 when not a tensor, or not measured
  uint32_t storage = kNoStorage;  // tensors with the same number hold the same bytes of memory, so they cross once

  friend bool operator==(const ValueSize&, const ValueSize&) = default;
};

// Filled by runtime/calibrate.h. By node and by value of the graph it was measured on.
struct Calibration {
  std::vector<double> node_s;  // seconds of one run on one worker thread; 0 where the node cannot move
  std::vector<ValueSize> values;

  friend bool operator==(const Calibration&, const Calibration&) = default;
};

struct Prices {
  // Workers share the batches, so a second in a worker holds up the stream by 1 / worker_count.
  double worker_count = 1;
  // A worker's second is worth less than the trainer's: it overlaps with training, and more workers can be had.
  double worker_second = 0.25;
  // How much slower (over 1) or faster (under 1) the trainer runs an operator than calibration did.
  double trainer_scale = 1;
  // What an operator costs the trainer beside its kernel: Python and dispatch.
  double trainer_node_s = 5e-6;
  // Bytes per second from worker to trainer.
  double link_bytes_per_s = 4e9;
  // The raw leaves reach the trainer whatever the plan is (local workers), so reading them there costs nothing.
  bool raw_stays = false;

  friend bool operator==(const Prices&, const Prices&) = default;
};

// Refuses prices that are not finite, are negative, or divide by zero.
Result<void> check_prices(const Prices& prices);

// Picoseconds, never more than kTicksMax each, so that sums over the largest graph (ir_text.h) stay within 62 bits and
// those over one unit within FlowNetwork::kCapacityMax.
using Ticks = int64_t;
inline constexpr Ticks kTicksMax = int64_t{1} << 43;  // 8.8 seconds

Ticks to_ticks(double seconds);
Ticks worker_price(const Prices& prices, double seconds);
Ticks link_price(const Prices& prices, int64_t bytes);

double trainer_seconds(const Prices& prices, double seconds);

}  // namespace penstock::graph
