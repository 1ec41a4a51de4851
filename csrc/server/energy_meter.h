// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker's part of its machine's energy (cluster/energy_share.h), by the CPU time of its processes; read from the
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
#include "cluster/energy_share.h"
#include "server/cpu_time.h"
#include "server/powercap.h"

namespace penstock::server {

// More often than a counter of the machine wraps around, and seldom enough to cost nothing.
constexpr Duration kEnergyInterval = std::chrono::seconds(1);

// How long the machine's CPUs have been busy, all together, since it was started. kUnsupported where that cannot be
// read.
Result<Duration> machine_busy_time();
// `table` is in the form of /proc/stat, in ticks of `ticks_per_s`.
Result<Duration> parse_busy_time(std::string_view table, int64_t ticks_per_s);

// Confined to one thread.
class EnergyMeter {
 public:
  // The time that processes were on CPUs, so far.
  using CpuTime = std::function<std::chrono::nanoseconds()>;

  // `folder` is a powercap tree; `cpu_time` says whose part of the energy it is.
  static Result<EnergyMeter> open(const std::string& folder, CpuTime cpu_time = process_cpu_time);

  // Reads the machine's counters, if they are due.
  void tick(Instant now);
  // Microjoules of these processes since the meter was opened, up to the last reading. An error stays.
  Result<uint64_t> process_uj() const;

 private:
  EnergyMeter(Powercap powercap, CpuTime cpu_time) : powercap_(std::move(powercap)), cpu_time_(std::move(cpu_time)) {}

  Result<cluster::EnergyReading> read();

  Powercap powercap_;
  CpuTime cpu_time_;
  cluster::EnergyShare share_;
  std::optional<Instant> read_at_;
  std::optional<Fault> error_;
};

}  // namespace penstock::server
