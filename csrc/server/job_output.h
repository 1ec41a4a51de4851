// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the process of a job, and what it starts, write to their standard error: for the worker's log, and for whoever
// asks how the process ended. It may be written to without end, and nothing waits for that.

#include <cstddef>
#include <string>
#include <utility>

#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock::server {

// So much of it is taken in one turn, and so much of its end is remembered.
constexpr size_t kOutputStepBytes = 64 << 10;
constexpr size_t kLastWordsBytesMax = 400;

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
  // The last whole lines of what was read, in one line with " | " between them; empty where it was nothing.
  std::string last_words() const;

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
