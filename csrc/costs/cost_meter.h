// SPDX-License-Identifier: Apache-2.0
#pragma once
// What workers spend on a trainer, as the trainer counts it (CostMeter), and a worker's share of its machine's energy
// (EnergyShare). Pure.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "base/clock.h"
#include "wire/reports.h"

namespace penstock::costs {

// The resources that workers spend on a trainer, from the meter readings in their messages. A worker's meter counts
// from the start of its process, so the trainer adds differences: resources that a worker spent before its welcome, for
// others, are not charged to this trainer, and the next message makes up for a lost one. Thread-compatible.
class CostMeter {
 public:
  // A worker starts to serve, or continues on a new link. With `is_continued` it has served in between.
  void welcomed(uint64_t worker_id, const wire::WorkerMeter& meter, bool is_continued, Instant now);
  // Any other message from a worker.
  void heard(uint64_t worker_id, const wire::WorkerMeter& meter, Instant now);
  // The trainer no longer uses the worker from now on.
  void parted(uint64_t worker_id, Instant now);
  struct Batch {
    uint64_t sample_count = 0;
    uint64_t bytes = 0;
  };
  void came(const Batch& batch);

  const wire::JobCosts& totals() const { return totals_; }

 private:
  struct Tenancy {
    Instant begun_at{};
    wire::WorkerMeter meter{};
    Instant heard_at{};
    bool is_metered = false;
    uint64_t cpu_ns = 0;  // counted so far, as is the energy in microjoules
    uint64_t energy_uj = 0;
  };

  void advance(Tenancy& tenancy, const wire::WorkerMeter& meter, Instant now);

  wire::JobCosts totals_;
  std::map<uint64_t, Tenancy> tenancies_;  // by worker, for the workers that serve now
};

// A reading of a machine's energy meter and CPU clocks. Each total has an arbitrary origin and only grows.
struct EnergyReading {
  uint64_t machine_uj = 0;
  Duration machine_busy{};  // of all its CPUs together
  Duration process_cpu{};
};

// A process's share of its machine's energy. The machine has one meter, so the energy between two readings is divided
// by CPU time:
//
//   energy of the process = energy of the machine * min(1, CPU time of the process / busy CPU time of the machine)
//
// The energy of idle CPUs is charged to the busy processes in proportion. So the shares of all processes add up to the
// machine's energy, and a sleeping process has used none.
//
// Thread-compatible.
class EnergyShare {
 public:
  // An interval in which the machine's busy time has not changed is not finished yet: that clock counts in coarse
  // steps.
  void note(const EnergyReading& reading) {
    if (!last_) {
      last_ = reading;
      return;
    }
    const Duration busy = reading.machine_busy - last_->machine_busy;
    if (busy <= Duration{}) return;
    const Duration cpu = std::max(reading.process_cpu - last_->process_cpu, Duration{});
    const double share = std::min(1.0, static_cast<double>(cpu.count()) / static_cast<double>(busy.count()));
    process_uj_ += share * static_cast<double>(reading.machine_uj - last_->machine_uj);
    last_ = reading;
  }

  // Since the first reading.
  uint64_t process_uj() const { return static_cast<uint64_t>(process_uj_); }

 private:
  std::optional<EnergyReading> last_;
  double process_uj_ = 0;
};

}  // namespace penstock::costs
