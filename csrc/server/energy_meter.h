// SPDX-License-Identifier: Apache-2.0
#pragma once
// The energy that a worker uses: EnergyMeter measures the worker's share of its machine's energy, whose counters
// Powercap reads.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "costs/cost_meter.h"
#include "server/maker.h"

namespace penstock::server {

inline constexpr char kPowercapFolder[] = "/sys/class/powercap";

// The energy used by this machine's processors and memory, from Linux's powercap tree: the RAPL counters of Intel and
// AMD processors. Only root may read them, unless an administrator allows others to.
//
//   intel-rapl:0      name "package-0", energy_uj, max_energy_range_uj     a processor: summed
//   intel-rapl:0:0    name "core"                                          a part of its processor
//   intel-rapl:0:1    name "dram"                                          not part of its processor: summed
//   intel-rapl:1      name "psys"                                          the platform, including processors
//   intel-rapl-mmio:0 name "package-0"                                     the same counter through another interface
//
// Thread-compatible.
class Powercap {
 public:
  // Finds the counters under `folder` and reads each once. kUnsupported, with the file and the reason, if there are
  // none or one cannot be read: the sum of the others would not be the energy of the machine.
  static Result<Powercap> open(const std::string& folder);

  // Microjoules since it was opened. A counter wraps around after 15 minutes at the earliest and must be read before
  // that. An error as above is permanent: the energy used meanwhile is unknown.
  Result<uint64_t> read();

 private:
  struct Zone {
    std::string counter;  // the path of energy_uj
    uint64_t range_uj = 0;
    uint64_t last_uj = 0;
  };

  std::vector<Zone> zones_;
  uint64_t total_uj_ = 0;
};

// Shorter than the wrap-around time of the machine's counters, and long enough to cost almost no time.
constexpr Duration kEnergyInterval = std::chrono::seconds(1);

// The total busy time of the machine's CPUs since it was started. kUnsupported if it cannot be read.
Result<Duration> machine_busy_time();
// `table` has the format of /proc/stat, in ticks of `ticks_per_s`.
Result<Duration> parse_busy_time(std::string_view table, int64_t ticks_per_s);

// A worker's share of its machine's energy (costs/cost_meter.h), by the CPU time of its processes; read from the system
// once a second. Confined to one thread.
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
