// SPDX-License-Identifier: Apache-2.0
#pragma once
// This process's part of its machine's energy (cluster/energy_share.h), read from the system once a second.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/instant.h"
#include "base/result.h"
#include "cluster/energy_share.h"
#include "worker/powercap.h"

namespace penstock::worker {

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
  // `folder` is a powercap tree.
  static Result<EnergyMeter> open(const std::string& folder);

  // Reads the machine's counters, if they are due.
  void tick(Instant now);
  // Microjoules of this process since the meter was opened, up to the last reading. An error stays.
  Result<uint64_t> process_uj() const;

 private:
  explicit EnergyMeter(Powercap powercap) : powercap_(std::move(powercap)) {}

  Result<cluster::EnergyReading> read();

  Powercap powercap_;
  cluster::EnergyShare share_;
  std::optional<Instant> read_at_;
  std::optional<Fault> error_;
};

}  // namespace penstock::worker
