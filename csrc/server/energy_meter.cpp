// SPDX-License-Identifier: Apache-2.0
#include "server/energy_meter.h"

#include <unistd.h>

#include <array>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>
#include <utility>

namespace penstock::server {

Result<Duration> parse_busy_time(std::string_view table, int64_t ticks_per_s) {
  std::istringstream line{std::string(table.substr(0, table.find('\n')))};
  std::string name;
  // user, nice, system, idle, iowait, irq, softirq. The following columns, steal and guests, are another machine's time
  // or part of user's.
  std::array<int64_t, 7> ticks{};
  line >> name;
  for (int64_t& count : ticks) line >> count;
  if (!line || name != "cpu" || ticks_per_s <= 0)
    return Fault{Errc::kUnsupported, "/proc/stat does not start with the CPU times of this machine; mount /proc"};
  const int64_t busy = ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6];
  return Duration(busy * (std::nano::den / ticks_per_s));
}

Result<Duration> machine_busy_time() {
  std::ifstream file("/proc/stat");
  std::string line;
  std::getline(file, line);
  return parse_busy_time(line, ::sysconf(_SC_CLK_TCK));
}

Result<EnergyMeter> EnergyMeter::open(const std::string& folder, CpuTime cpu_time) {
  auto powercap = Powercap::open(folder);
  if (!powercap) return powercap.error();
  EnergyMeter meter(std::move(powercap).value(), std::move(cpu_time));
  const auto first = meter.read();
  if (!first) return first.error();
  meter.share_.note(first.value());
  return meter;
}

void EnergyMeter::tick(Instant now) {
  if (error_ || (read_at_ && now - *read_at_ < kEnergyInterval)) return;
  read_at_ = now;
  const auto reading = read();
  if (!reading) {
    error_ = reading.error();
    return;
  }
  share_.note(reading.value());
}

Result<uint64_t> EnergyMeter::process_uj() const {
  if (error_) return *error_;
  return share_.process_uj();
}

Result<costs::EnergyReading> EnergyMeter::read() {
  const auto machine_uj = powercap_.read();
  if (!machine_uj) return machine_uj.error();
  const auto busy = machine_busy_time();
  if (!busy) return busy.error();
  return costs::EnergyReading{
      .machine_uj = machine_uj.value(), .machine_busy = busy.value(), .process_cpu = cpu_time_()};
}

}  // namespace penstock::server
