// SPDX-License-Identifier: Apache-2.0
#pragma once
// The part of a worker's reports for operators: the use of its machine's CPUs and memory (HostLoadMeter), and the last
// lines of its log (LogTail).

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/result.h"
#include "wire/reports.h"

namespace penstock::server {

constexpr Duration kHostLoadInterval = std::chrono::seconds(2);

// Memory of a machine in bytes. Used memory excludes caches, which the kernel could give to another program.
struct HostMemory {
  uint64_t total_bytes = 0;
  uint64_t used_bytes = 0;
};
// `table` has the format of /proc/meminfo. kUnsupported without MemTotal or MemAvailable.
Result<HostMemory> parse_meminfo(std::string_view table);

// The use of this machine, read from /proc once every kHostLoadInterval; in a container this is the whole machine, too.
// Confined to one thread.
class HostLoadMeter {
 public:
  // All zeros if /proc cannot be read. The CPUs count as unused until the second reading.
  const wire::HostLoad& read(Instant now);

 private:
  wire::HostLoad load_;
  std::optional<Instant> read_at_;
  std::optional<Duration> busy_;  // at the last reading
};

// The last lines of a worker's log: its own lines, and the lines of its job processes under its name. The output of
// jobs is not part of it. Thread-safe.
class LogTail {
 public:
  // `text` is a message without time and name; each is kept with the local time.
  void add(std::string_view text);
  // Adds the log lines under `log_name` that are part of the output of a job process, with the time of this call.
  void add_output(std::string_view output, std::string_view log_name);
  // At most wire::kLogLinesMax lines, oldest first.
  std::string text() const;

 private:
  void append(std::string_view text) PENSTOCK_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::deque<std::string> lines_ PENSTOCK_GUARDED_BY(mutex_);
  std::string partial_ PENSTOCK_GUARDED_BY(mutex_);  // the beginning of a line of output
};

}  // namespace penstock::server
