// SPDX-License-Identifier: Apache-2.0
#include "server/energy_meter.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>
#include <utility>

namespace penstock::server {
namespace {

constexpr std::string_view kZonePrefix = "intel-rapl:";

Result<std::string> read_file(const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (file.bad() || !file.is_open() || text.empty()) {
    const int number = errno;
    return Fault{Errc::kUnsupported, path + " cannot be read" + (number != 0 ? ": " : "") +
                                         (number != 0 ? std::strerror(number) : "") +
                                         (number == EACCES ? "; an administrator can permit it (chmod a+r)" : "")};
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

Result<uint64_t> read_number(const std::string& path) {
  auto text = read_file(path);
  if (!text) return text.error();
  uint64_t number = 0;
  const char* const end = text.value().data() + text.value().size();
  const auto [rest, error] = std::from_chars(text.value().data(), end, number);
  if (error != std::errc() || rest != end)
    return Fault{Errc::kUnsupported, path + " is \"" + text.value().substr(0, 40) + "\", but must be a number"};
  return number;
}

// Whether the sum includes the counter of a zone of this name.
bool is_summed(std::string_view name) { return name.starts_with("package") || name == "dram"; }

}  // namespace

Result<Powercap> Powercap::open(const std::string& folder) {
  // Not std::filesystem: libtorch exports symbols of it that fail when called from outside.
  DIR* const entries = ::opendir(folder.c_str());
  if (entries == nullptr)
    return Fault{Errc::kUnsupported,
                 "this machine does not report its energy: " + folder + ": " + std::strerror(errno)};
  std::vector<std::string> paths;
  while (const dirent* entry = ::readdir(entries))
    if (std::string_view(entry->d_name).starts_with(kZonePrefix)) paths.push_back(folder + "/" + entry->d_name);
  ::closedir(entries);
  std::sort(paths.begin(), paths.end());
  Powercap powercap;
  for (const std::string& path : paths) {
    const auto name = read_file(path + "/name");
    if (!name) return name.error();
    if (!is_summed(name.value())) continue;
    Zone zone{.counter = path + "/energy_uj"};
    const auto range = read_number(path + "/max_energy_range_uj");
    if (!range) return range.error();
    zone.range_uj = range.value();
    const auto now = read_number(zone.counter);
    if (!now) return now.error();
    zone.last_uj = now.value();
    powercap.zones_.push_back(std::move(zone));
  }
  if (powercap.zones_.empty())
    return Fault{Errc::kUnsupported,
                 "this machine does not report its energy: " + folder + " has no intel-rapl zone of a package"};
  return powercap;
}

Result<uint64_t> Powercap::read() {
  for (Zone& zone : zones_) {
    const auto now = read_number(zone.counter);
    if (!now) return now.error();
    const bool has_wrapped = now.value() < zone.last_uj;
    if (has_wrapped && zone.last_uj > zone.range_uj)
      return Fault{Errc::kUnsupported, zone.counter + " decreased from " + std::to_string(zone.last_uj) +
                                           ", which is above its range of " + std::to_string(zone.range_uj)};
    total_uj_ += has_wrapped ? zone.range_uj - zone.last_uj + now.value() : now.value() - zone.last_uj;
    zone.last_uj = now.value();
  }
  return total_uj_;
}

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
