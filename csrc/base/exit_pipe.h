// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a worker process of a pool tells its supervisor why it ends: over a pipe that penstock's own code alone writes
// to, and never by an exit code, which the dataset that runs in the process may choose. PROTOCOL.md has the lines.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock {

enum class ExitWord : uint8_t {
  kServing,  // it listens
  kLeft,     // one of its workers will not be back, whose place in the process is behind the word; others go on
  kDrained,  // it was told to leave, and no other process takes its place
  kUseless,  // another process would fare no better, for a reason that it has logged
  kFailed,   // it cannot go on, and another process may
};
// The word as it is written, and the word of that name, if there is one.
std::string_view name_of(ExitWord word);
std::optional<ExitWord> exit_word_named(std::string_view name);

// So short that the system writes a line in one piece, or not at all.
constexpr size_t kExitLineBytesMax = 1024;

// Writes a line; a longer text is cut off. Never waits: a line that finds no room is lost. Does nothing where `fd` is
// -1. Thread-safe.
void write_exit_line(int fd, ExitWord word, std::string_view text = {});

// Hears these words of a worker, on any thread. Empty where nobody looks after the worker.
using ExitListener = std::function<void(ExitWord word, std::string_view text)>;
// One that writes each as a line; empty where `fd` is -1.
ExitListener exit_line_writer(int fd);

// The supervisor's side of the pipe. Thread-compatible.
class ExitPipe {
 public:
  // kNoMemory where the system has no descriptor left.
  static Result<ExitPipe> open();

  int read_fd() const { return read_.get(); }
  int write_fd() const { return write_.get(); }
  // The process has its own copy of the writing end by now.
  void close_write() { write_.reset(); }

  // Takes in the lines that are there, and ignores others than write_exit_line() writes. Never waits. Returns false
  // once nobody has the writing end any more; a process that the dataset has forked may keep it for longer than the
  // worker lives.
  bool read();

  bool has_served() const { return has_served_; }
  // The places of workers that have left before the process ends.
  const std::set<size_t>& left() const { return left_; }
  // Why the process ends; none until it has told.
  std::optional<ExitWord> end() const { return end_; }
  // For people; empty where there is none.
  const std::string& text() const { return text_; }

 private:
  ExitPipe(FileDescriptor read, FileDescriptor write);
  void take(std::string_view line);

  FileDescriptor read_;
  FileDescriptor write_;
  std::string unfinished_;  // line
  bool has_served_ = false;
  std::set<size_t> left_;
  std::optional<ExitWord> end_;
  std::string text_;
};

}  // namespace penstock
