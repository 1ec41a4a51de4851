// SPDX-License-Identifier: Apache-2.0
#pragma once
// The output of a job's process (JobOutput), the limit on how much of it is logged (OutputBudget), and the format of
// durations in logs.

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock::server {

// Limits: the bytes read in one turn, the bytes kept of the end of the output, and the bytes of these that are
// reported.
constexpr size_t kOutputStepBytes = 64 << 10;
constexpr size_t kTailBytesMax = 4096;
constexpr size_t kLastOutputBytesMax = 400;
// Limits of the job output in a worker's log: in a burst, and per second on average.
constexpr size_t kOutputBurstBytes = size_t{1} << 20;
constexpr size_t kOutputBytesPerSecond = 16 << 10;

// Limits how much job output may be logged. Pure.
class OutputBudget {
 public:
  // Returns how many of `bytes` may be logged, and spends them.
  size_t take(size_t bytes, Instant now);

 private:
  double left_ = kOutputBurstBytes;
  std::optional<Instant> filled_at_;
};

// The standard output and standard error of a job's process and its children, read from a pipe: for the worker's log,
// and for reports of how the process ended. The output may be endless; the server never waits for it.
// Thread-compatible.
class JobOutput {
 public:
  JobOutput() = default;  // of a process without output
  explicit JobOutput(FileDescriptor pipe) : pipe_(std::move(pipe)) {}

  struct Ends;
  // kNoMemory if the system has no descriptors left.
  static Result<Ends> open();

  // Readable when there is more; -1 once no process can write any more.
  int fd() const { return pipe_.get(); }
  // Whether it was found readable since the last read().
  bool is_readable() const { return is_readable_; }
  void note_readable() { is_readable_ = true; }
  // Returns the available output without waiting; at most kOutputStepBytes.
  std::string read();
  // The last complete lines that were read, except the log lines of `log_name`, joined with " | "; empty if there are
  // no other lines.
  std::string last_output(std::string_view log_name) const;

 private:
  FileDescriptor pipe_;
  bool is_readable_ = false;
  std::string tail_;
};

struct JobOutput::Ends {
  JobOutput here;
  FileDescriptor there;
};

// Formats a duration for logs: rounded down to seconds, or to milliseconds if below a second.
inline std::string format_duration(Duration time) {
  using std::chrono::duration_cast;
  const auto seconds = duration_cast<std::chrono::seconds>(time).count();
  if (seconds > 0) return std::to_string(seconds) + " s";
  return std::to_string(duration_cast<std::chrono::milliseconds>(time).count()) + " ms";
}

}  // namespace penstock::server
