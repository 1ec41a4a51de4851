// SPDX-License-Identifier: Apache-2.0
#pragma once
// The price of a cut.
//
// A loader and its trainer are a pipeline of stages that work at the same time on different batches, so a training step
// takes as long as the slowest of them, whatever the others do:
//
//   trainer  its seconds for a batch: what is not for a plan to choose (the rest of forward, backward, the optimizer),
//            the operators that could have moved and stay, and the first reading of boundary tensors
//   workers  a worker's seconds for a batch over the number of workers: the dataset and collate, the operators that
//            moved, and the writing of boundary tensors
//   link     the seconds that the bytes take from the workers to the trainer, where a network lies between them, or to
//            the trainer's device
//   CPUs     all that the trainer and a worker compute for a batch, over the CPUs that they share
//
// Calibration measures the operators of one batch. The rest (Loads) is measured while the loader runs, since it is the
// rest that says which stage is the slowest: where the workers are, moving an operator makes the step longer. Before it
// is measured, a plan is chosen by the weighted sum of the stages alone, in which a worker's second is worth less than
// the trainer's. The choice by the slowest stage is in bottleneck.h; it too asks for the cheapest cut by weighted sums,
// of several weights. Sums are of integer picoseconds, so that the cheapest cut is exact and the same on every machine.

#include <cstdint>
#include <limits>
#include <optional>
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
  // Seconds of one run on as many threads as the trainer has, or on the device that the program runs it on; empty when
  // that is one thread, too.
  std::vector<double> trainer_node_s = {};
  // Bytes per second from pinned memory to the program's device; 0 where there is none.
  double copy_bytes_per_s = 0;

  friend bool operator==(const Calibration&, const Calibration&) = default;
};

// The costs of a batch that no plan changes, measured while the loader runs.
struct Loads {
  double trainer_s = 0;  // the trainer's seconds for a batch but for the operators that could have moved
  double worker_s = 0;   // a worker's seconds for a batch but for those that moved
  double link_s = 0;     // the link's seconds for the bytes of a batch that no plan changes
  double cpus = 0;       // that trainer and workers share; 0: enough of them

  friend bool operator==(const Loads&, const Loads&) = default;
};

// The weight of a second of each stage in a weighted sum.
struct Weights {
  double trainer = 1;
  double worker = 0.25;  // it overlaps with training, and more workers can be had
  double link = 1;
};

struct Prices {
  // Workers share the batches, so a second in a worker holds up the stream by 1 / worker_count.
  double worker_count = 1;
  // The weight of a worker's second before loads are known.
  double worker_second = Weights{}.worker;
  // How much slower (over 1) or faster (under 1) the trainer, or a worker, runs an operator than calibration did.
  double trainer_scale = 1;
  double worker_scale = 1;
  // The trainer's cost of an operator beside its kernel: Python and dispatch.
  double trainer_node_s = 5e-6;
  // Bytes per second between a worker and the trainer; infinite in shared memory.
  double link_bytes_per_s = 4e9;
  // The seconds of a worker's CPU, and of the trainer's, for a byte that crosses the link: sealing and opening it.
  double send_byte_s = 0;
  double receive_byte_s = 0;
  // Bytes per second at which a worker writes boundary tensors to the batch, and the trainer first reads them there.
  double write_bytes_per_s = std::numeric_limits<double>::infinity();
  double read_bytes_per_s = std::numeric_limits<double>::infinity();
  // The trainer's cost of a plan that moves anything: looking at each batch, and running the rest as a graph. The
  // price chooses no cut that promises less than that.
  double cut_s = 0;
  // The raw leaves reach the trainer whatever the plan is (local workers, or a pool that sends whole batches), so
  // reading them there costs nothing.
  bool raw_stays = false;
  // Known once the loader has run for a while.
  std::optional<Loads> loads = {};

  Weights weights() const { return {.trainer = 1, .worker = worker_second, .link = 1}; }

  friend bool operator==(const Prices&, const Prices&) = default;
};

// For workers on the trainer's machine. They share its memory, so no link lies between them, and the raw batch is there
// in any case.
Prices local_prices(double worker_count);

// The link to the workers of a pool, as it was measured.
struct LinkRate {
  double bytes_per_s = std::numeric_limits<double>::infinity();  // of all workers together
  bool sends_whole = true;  // leaves that the trainer does not need cross all the same

  friend bool operator==(const LinkRate&, const LinkRate&) = default;
};
// Before batches have crossed a link: 1 Gbit/s. A plan that sends more than it must waits for a measurement.
inline constexpr double kUnknownLinkBytesPerS = 125e6;

// For workers behind a link.
Prices link_prices(double worker_count, const LinkRate& link);

// Refuses prices that are not finite where they must be, are negative, or divide by zero.
Result<void> check_prices(const Prices& prices);

// Picoseconds, never more than kTicksMax each, so that sums over the largest graph (ir_text.h) stay within 62 bits and
// those over one unit within FlowNetwork::kCapacityMax.
using Ticks = int64_t;
inline constexpr Ticks kTicksMax = int64_t{1} << 43;  // 8.8 seconds

Ticks to_ticks(double seconds);

// The seconds of one batch, by stage; of a worker and not of all.
struct StageSeconds {
  double trainer_s = 0;
  double worker_s = 0;
  double link_s = 0;

  StageSeconds& operator+=(const StageSeconds& other);
  friend bool operator==(const StageSeconds&, const StageSeconds&) = default;
};

// The seconds that bytes take to cross the link, and that either side spends on it.
StageSeconds link_seconds(const Prices& prices, int64_t bytes);
// The seconds that bytes of boundary tensors take to be written and read. Raw leaves do not count: they are written and
// read whatever the plan is.
StageSeconds memory_seconds(const Prices& prices, int64_t bytes);

// The weighted sum; workers share their seconds.
Ticks price_of(const Prices& prices, const Weights& weights, const StageSeconds& seconds);

// How long a step takes, of a plan with these seconds on top of the loads, and how long each side is at work in it.
struct StepSeconds {
  double trainer_s = 0;
  double worker_s = 0;  // of one worker
  double link_s = 0;
  double step_s = 0;  // the slowest stage
};
StepSeconds step_of(const Prices& prices, const Loads& loads, const StageSeconds& seconds);
double step_seconds(const Prices& prices, const Loads& loads, const StageSeconds& seconds);

}  // namespace penstock::graph
