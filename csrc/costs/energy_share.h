// SPDX-License-Identifier: Apache-2.0
#pragma once
// A process's share of its machine's energy. The machine has one meter, so the energy between two readings is divided
// by CPU time:
//
//   energy of the process = energy of the machine * min(1, CPU time of the process / busy CPU time of the machine)
//
// The energy of idle CPUs is charged to the busy processes in proportion. So the shares of all processes add up to the
// machine's energy, and a sleeping process has used none.

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/instant.h"

namespace penstock::costs {

// Each total has an arbitrary origin and only grows.
struct EnergyReading {
  uint64_t machine_uj = 0;
  Duration machine_busy{};  // of all its CPUs together
  Duration process_cpu{};
};

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
