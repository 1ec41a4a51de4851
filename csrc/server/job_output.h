// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the process of a job, and what it starts, write to their standard output and standard error: for the worker's
// log, and for whoever asks how the process ended. It may be written to without end, and nothing waits for that.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/file_descriptor.h"
#include "base/instant.h"
#include "base/result.h"

namespace penstock::server {

// So much of it is taken in one turn, and so much of its end is remembered, and told.
constexpr size_t kOutputStepBytes = 64 << 10;
constexpr size_t kTailBytesMax = 4096;
constexpr size_t kLastWordsBytesMax = 400;
// So much of what jobs write comes into the log of their worker at once, and in each second in the long run.
constexpr size_t kOutputBurstBytes = size_t{1} << 20;
constexpr size_t kOutputBytesPerSecond = 16 << 10;

// How much of what jobs write may come into a log. Pure.
class OutputBudget {
 public:
  // How many of so many bytes may, which are then spent.
  size_t take(size_t bytes, Instant now);

 private:
  double left_ = kOutputBurstBytes;
  std::optional<Instant> filled_at_;
};

// The reading end of a pipe. Thread-compatible.
class JobOutput {
 public:
  JobOutput() = default;  // of a process that has none
  explicit JobOutput(FileDescriptor pipe) : pipe_(std::move(pipe)) {}

  struct Ends;
  // kNoMemory where the system has no descriptor left.
  static Result<Ends> open();

  // Readable when there is more; -1 once nobody can write any more.
  int fd() const { return pipe_.get(); }
  // Whether it was found to be since the last read().
  bool is_readable() const { return is_readable_; }
  void note_readable() { is_readable_ = true; }
  // What has come, without waiting; at most kOutputStepBytes.
  std::string read();
  // The last whole lines of what was read, without those of the log of this name, in one line with " | " between them;
  // empty where it was nothing else.
  std::string last_words(std::string_view log_name) const;

 private:
  FileDescriptor pipe_;
  bool is_readable_ = false;
  std::string tail_;
};

struct JobOutput::Ends {
  JobOutput here;
  FileDescriptor there;
};

}  // namespace penstock::server
