// SPDX-License-Identifier: Apache-2.0
#pragma once
// A process's part of its machine's energy. The machine has one meter for all, so each stretch of time between two
// readings is shared out by CPU time:
//
//   energy of the process = energy of the machine * min(1, CPU time of the process / busy CPU time of the machine)
//
// The energy of idle CPUs goes to those who are busy, each by its share. So the parts of all processes together are
// what the machine has used, and a process that sleeps has used nothing.

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/instant.h"

namespace penstock::cluster {

// Each total counts from any time on and only grows.
struct EnergyReading {
  uint64_t machine_uj = 0;
  Duration machine_busy{};  // of all its CPUs together
  Duration process_cpu{};
};

// Thread-compatible.
class EnergyShare {
 public:
  // A stretch in which the machine's clock of busy time has not moved is not over yet: it counts in coarse steps.
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

}  // namespace penstock::cluster
