// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker's share of its machine's energy (costs/energy_share.h), by the CPU time of its processes; read from the
// system once a second.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/instant.h"
#include "base/result.h"
#include "costs/energy_share.h"
#include "server/cpu_time.h"
#include "server/powercap.h"

namespace penstock::server {

// Shorter than the wrap-around time of the machine's counters, and long enough to cost almost no time.
constexpr Duration kEnergyInterval = std::chrono::seconds(1);

// The total busy time of the machine's CPUs since it was started. kUnsupported if it cannot be read.
Result<Duration> machine_busy_time();
// `table` has the format of /proc/stat, in ticks of `ticks_per_s`.
Result<Duration> parse_busy_time(std::string_view table, int64_t ticks_per_s);

// Confined to one thread.
class EnergyMeter {
 public:
  // The CPU time of a set of processes so far.
  using CpuTime = std::function<std::chrono::nanoseconds()>;

  // `folder` is a powercap tree; `cpu_time` determines the processes whose share of the energy is measured.
  static Result<EnergyMeter> open(const std::string& folder, CpuTime cpu_time = process_cpu_time);

  // Reads the machine's counters if a reading is due.
  void tick(Instant now);
  // Microjoules used by these processes since the meter was opened, up to the last reading. An error is permanent.
  Result<uint64_t> process_uj() const;

 private:
  EnergyMeter(Powercap powercap, CpuTime cpu_time) : powercap_(std::move(powercap)), cpu_time_(std::move(cpu_time)) {}

  Result<costs::EnergyReading> read();

  Powercap powercap_;
  CpuTime cpu_time_;
  costs::EnergyShare share_;
  std::optional<Instant> read_at_;
  std::optional<Fault> error_;
};

}  // namespace penstock::server
