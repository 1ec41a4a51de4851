// SPDX-License-Identifier: Apache-2.0
#pragma once
// The price of a cut.
//
// A loader and its trainer are a pipeline of stages that work at the same time on different batches, so a training step
// takes as long as the slowest of them:
//
//   trainer  its seconds for a batch: everything that does not depend on the plan (the rest of forward, backward, the
//            optimizer), the operators that could have moved and stay, and the first reading of boundary tensors
//   workers  a worker's seconds for a batch divided by the number of workers: the dataset and collate, the operators
//            that moved, and the writing of boundary tensors
//   link     the seconds that the bytes take from the workers to the trainer, if there is a network between them, or to
//            the trainer's device
//   CPUs     the CPU seconds of the trainer and a worker for a batch, divided by the number of CPUs that they share
//
// Calibration measures the operators of one batch. The rest (Loads) is measured while the loader runs, since the rest
// determines which stage is the slowest: if it is the workers, moving an operator makes the step longer. Before it is
// measured, a plan is chosen only by the weighted sum of the stages, in which a worker's second weighs less than the
// trainer's. The choice by the slowest stage is in plan.h; it also uses the cheapest cuts by weighted sums, with
// several weights. Sums are of integer picoseconds, so that the cheapest cut is exact and the same on every machine.

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "base/result.h"

namespace penstock::graph {

struct ValueSize {
  static constexpr uint32_t kNoStorage = std::numeric_limits<uint32_t>::max();

  int64_t bytes = 0;              // of a tensor's elements; 0 if not a tensor, or not measured
  uint32_t storage = kNoStorage;  // tensors with the same number hold the same bytes of memory, so they cross once

  friend bool operator==(const ValueSize&, const ValueSize&) = default;
};

// Filled by runtime/calibrate.h. By node and by value of the graph on which it was measured.
struct Calibration {
  std::vector<double> node_s;  // seconds of one run on one worker thread; 0 if the node cannot move
  std::vector<ValueSize> values;
  // Seconds of one run on as many threads as the trainer has, or on the device on which the program runs it; empty if
  // that is one thread, too.
  std::vector<double> trainer_node_s = {};
  // Bytes per second from pinned memory to the program's device; 0 if there is none.
  double copy_bytes_per_s = 0;

  friend bool operator==(const Calibration&, const Calibration&) = default;
};

// The costs of a batch that do not depend on the plan, measured while the loader runs.
struct Loads {
  double trainer_s = 0;  // the trainer's seconds for a batch without the operators that could have moved
  double worker_s = 0;   // a worker's seconds for a batch without moved operators
  double link_s = 0;     // the link's seconds for the bytes of a batch that do not depend on the plan
  double cpus = 0;       // shared by trainer and workers; 0: enough of them

  friend bool operator==(const Loads&, const Loads&) = default;
};

// The weight of a second of each stage in a weighted sum.
struct Weights {
  double trainer = 1;
  double worker = 0.25;  // it overlaps with training, and workers can be added
  double link = 1;
};

struct Prices {
  // Workers share the batches, so a second in a worker delays the stream by 1 / worker_count.
  double worker_count = 1;
  // The weight of a worker's second before loads are known.
  double worker_second = Weights{}.worker;
  // How much slower (over 1) or faster (under 1) the trainer, or a worker, runs an operator than calibration did.
  double trainer_scale = 1;
  double worker_scale = 1;
  // The trainer's cost of an operator in addition to its kernel: Python and dispatch.
  double trainer_node_s = 5e-6;
  // Bytes per second between a worker and the trainer; infinite in shared memory.
  double link_bytes_per_s = 4e9;
  // The CPU seconds of the worker, and of the trainer, per byte that crosses the link: sealing and opening it.
  double send_byte_s = 0;
  double receive_byte_s = 0;
  // Bytes per second at which a worker writes boundary tensors to the batch, and at which the trainer first reads them
  // there.
  double write_bytes_per_s = std::numeric_limits<double>::infinity();
  double read_bytes_per_s = std::numeric_limits<double>::infinity();
  // The trainer's cost of a plan that moves anything: checking each batch, and running the rest as a graph. No cut is
  // chosen that saves less than this.
  double cut_s = 0;
  // The raw leaves reach the trainer with every plan (local workers, or a pool that sends whole batches), so reading
  // them there has no extra cost.
  bool raw_stays = false;
  // Known once the loader has run for a while.
  std::optional<Loads> loads = {};

  Weights weights() const { return {.trainer = 1, .worker = worker_second, .link = 1}; }

  friend bool operator==(const Prices&, const Prices&) = default;
};

// For workers on the trainer's machine. They share its memory, so there is no link between them, and the raw batch is
// available in any case.
Prices local_prices(double worker_count);

// The measured link to the workers of a pool.
struct LinkRate {
  double bytes_per_s = std::numeric_limits<double>::infinity();  // of all workers together
  bool sends_whole = true;                                       // leaves that the trainer does not need cross anyway

  friend bool operator==(const LinkRate&, const LinkRate&) = default;
};
// Used until batches have crossed a link: 1 Gbit/s. A plan that sends more than it must waits for a measurement.
inline constexpr double kUnknownLinkBytesPerS = 125e6;

// For workers behind a link.
Prices link_prices(double worker_count, const LinkRate& link);

// Rejects prices that are not finite where they must be, are negative, or divide by zero.
Result<void> check_prices(const Prices& prices);

// Picoseconds, at most kTicksMax each, so that sums over the largest graph (ir_text.h) stay within 62 bits, and sums
// over one unit within FlowNetwork::kCapacityMax.
using Ticks = int64_t;
inline constexpr Ticks kTicksMax = int64_t{1} << 43;  // 8.8 seconds

Ticks to_ticks(double seconds);

// The seconds of one batch, by stage; of one worker, not of all.
struct StageSeconds {
  double trainer_s = 0;
  double worker_s = 0;
  double link_s = 0;

  StageSeconds& operator+=(const StageSeconds& other);
  friend bool operator==(const StageSeconds&, const StageSeconds&) = default;
};

// The seconds that bytes take to cross the link, and that each side spends on it.
StageSeconds link_seconds(const Prices& prices, int64_t bytes);
// The seconds that bytes of boundary tensors take to be written and read. Raw leaves do not count: they are written and
// read with every plan.
StageSeconds memory_seconds(const Prices& prices, int64_t bytes);

// The weighted sum; workers share their seconds.
Ticks price_of(const Prices& prices, const Weights& weights, const StageSeconds& seconds);

// How long a step takes with a plan of these seconds in addition to the loads, and how long each side works in it.
struct StepSeconds {
  double trainer_s = 0;
  double worker_s = 0;  // of one worker
  double link_s = 0;
  double step_s = 0;  // the slowest stage
};
StepSeconds step_of(const Prices& prices, const Loads& loads, const StageSeconds& seconds);
double step_seconds(const Prices& prices, const Loads& loads, const StageSeconds& seconds);

}  // namespace penstock::graph
