// SPDX-License-Identifier: Apache-2.0
#include "server/powercap.h"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
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

}  // namespace penstock::server
