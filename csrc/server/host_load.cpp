// SPDX-License-Identifier: Apache-2.0
#include "server/host_load.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "server/energy_meter.h"

namespace penstock::server {
namespace {

constexpr size_t kPartialBytesMax = 4096;

}  // namespace

Result<HostMemory> parse_meminfo(std::string_view table) {
  std::istringstream lines{std::string(table)};
  std::optional<uint64_t> total_kb;
  std::optional<uint64_t> available_kb;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string name;
    uint64_t kb = 0;
    if (!(fields >> name >> kb)) continue;
    if (name == "MemTotal:") total_kb = kb;
    if (name == "MemAvailable:") available_kb = kb;
  }
  if (!total_kb || !available_kb || *available_kb > *total_kb)
    return Fault{Errc::kUnsupported, "/proc/meminfo does not contain the memory of this machine; mount /proc"};
  return HostMemory{.total_bytes = *total_kb * 1024, .used_bytes = (*total_kb - *available_kb) * 1024};
}

const wire::HostLoad& HostLoadMeter::read(Instant now) {
  if (read_at_ && now - *read_at_ < kHostLoadInterval) return load_;
  const auto before = std::exchange(read_at_, now);
  const auto busy = machine_busy_time();
  std::ifstream file("/proc/meminfo");
  const auto memory = parse_meminfo(std::string(std::istreambuf_iterator<char>(file), {}));
  const int64_t cpu_count = ::sysconf(_SC_NPROCESSORS_ONLN);
  if (!busy || !memory || cpu_count < 1) return load_ = {};
  load_.cpu_count = static_cast<uint16_t>(std::min<int64_t>(cpu_count, wire::kCpuCountMax));
  load_.memory_bytes = memory.value().total_bytes;
  load_.memory_used_bytes = memory.value().used_bytes;
  if (before && busy_) {
    const double capacity = std::chrono::duration<double>(now - *before).count() * static_cast<double>(cpu_count);
    const double share = std::chrono::duration<double>(busy.value() - *busy_).count() / capacity;
    load_.cpu_permille = static_cast<uint16_t>(std::lround(1000 * std::clamp(share, 0.0, 1.0)));
  }
  busy_ = busy.value();
  return load_;
}

void LogTail::add(std::string_view text) {
  MutexLock lock(mutex_);
  append(text);
}

void LogTail::append(std::string_view text) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  std::array<char, 16> when{};
  std::strftime(when.data(), when.size(), "%H:%M:%S ", &parts);
  std::string line = when.data();
  line += text.substr(0, wire::kLogLineBytesMax - line.size());
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::replace(line.begin(), line.end(), '\0', ' ');
  lines_.push_back(std::move(line));
  if (lines_.size() > wire::kLogLinesMax) lines_.pop_front();
}

void LogTail::add_output(std::string_view output, std::string_view log_name) {
  MutexLock lock(mutex_);
  partial_ += output;
  size_t begin = 0;
  for (size_t end = partial_.find('\n'); end != std::string::npos; end = partial_.find('\n', begin)) {
    const std::string_view line = std::string_view(partial_).substr(begin, end - begin);
    begin = end + 1;
    const size_t name = line.find(" " + std::string(log_name) + " on ");
    const size_t text = name == std::string_view::npos ? name : line.find(": ", name);
    if (text != std::string_view::npos) append(line.substr(text + 2));
  }
  partial_.erase(0, begin);
  if (partial_.size() > kPartialBytesMax) partial_.clear();  // such a line is not ours
}

std::string LogTail::text() const {
  MutexLock lock(mutex_);
  std::string text;
  for (const std::string& line : lines_) text += (text.empty() ? "" : "\n") + line;
  return text;
}

}  // namespace penstock::server
