// SPDX-License-Identifier: Apache-2.0
#pragma once
// The settings of one simulated run, all of them from one seed: the numbers of workers and trainers, their datasets,
// and how often which fault strikes.

#include <cstdint>
#include <random>
#include <string>

#include "base/clock.h"
#include "server/maker.h"

namespace penstock::sim {

using Random = std::mt19937_64;

struct Scenario {
  uint64_t seed = 0;

  uint32_t worker_count = 1;
  uint32_t trainer_count = 1;
  uint32_t batch_count = 1;  // of an epoch, or of one shard of an iterable dataset
  uint32_t epoch_count = 1;
  uint32_t shard_count = 0;  // 0: a map-style dataset
  uint32_t depth_max = 2;
  uint64_t credit_bytes = 0;
  Duration work_time{};  // of a batch, on average
  Duration step_time{};  // of the trainer

  // Chances for each message.
  double loss = 0;
  double duplication = 0;
  double reordering = 0;
  double lateness = 0;  // arrives seconds later

  double recall = 0;  // of a batch, once it was delivered; of map-style datasets

  // How many of these happen before `calm_at`.
  uint32_t worker_crashes = 0;   // the process dies; trainers see the connection end
  uint32_t machine_crashes = 0;  // nobody sees anything
  uint32_t worker_joins = 0;
  uint32_t worker_drains = 0;
  uint32_t stalls = 0;      // of any process, up to several leases
  uint32_t partitions = 0;  // between two processes, either way or both
  uint32_t controller_crashes = 0;
  uint32_t trainer_crashes = 0;        // and a resume from the batches that it had delivered
  bool has_declining = false;          // some workers decline some trainers
  uint32_t intruders = 0;              // trainers that greet every worker, and were given none by the controller
  bool has_poison = false;             // a batch of the first trainer's kills whoever makes it
  uint32_t process_ends = 0;           // of the process in which a worker makes its batches, while the worker lives
  bool poison_spares_workers = false;  // the batch that kills ends that process alone
  uint32_t hangs = 0;                  // of that process in a batch, before `calm_at`, some of them for ever
  double hang = 0;                     // the chance of one for each batch that is begun
  bool has_hang_poison = false;        // a batch of the first trainer's hangs for ever, whoever makes it
  bool sends_goodbye = false;          // programs that end tell the workers
  Duration timeout{};                  // for which a program waits for a batch before it ends; 0: for ever
  server::AbandonedGrace abandoned_grace{};
  Duration drain_grace{};
  Duration calm_at{};
  Duration end_at{};  // by then all is delivered, or something is lost

  bool has_hangs() const { return hangs > 0 || has_hang_poison; }

  static Scenario draw(uint64_t seed);
  std::string describe() const;
};

}  // namespace penstock::sim
