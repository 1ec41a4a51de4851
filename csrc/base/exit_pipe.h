// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a pool's worker process reports to its supervisor why it ends: over a pipe that only penstock's code writes to,
// and never by an exit code, which the dataset that runs in the process may choose. PROTOCOL.md specifies the lines.

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
  kLeft,     // one of its workers will not return; the word is followed by that worker's place; the others continue
  kDrained,  // it was asked to leave, and no other process replaces it
  kUseless,  // another process would fail too, for a reason that it has logged
  kFailed,   // it cannot continue, but another process may
};
// The word as it is written, and the word of that name, if there is one.
std::string_view name_of(ExitWord word);
std::optional<ExitWord> exit_word_named(std::string_view name);

// Short enough that the system writes a line in one piece or not at all.
constexpr size_t kExitLineBytesMax = 1024;

// Writes a line; a longer text is truncated. Never waits: if the pipe has no room, the line is lost. No-op if `fd` is
// -1. Thread-safe.
void write_exit_line(int fd, ExitWord word, std::string_view text = {});

// Receives these words from a worker, on any thread. Empty if the worker has no supervisor.
using ExitListener = std::function<void(ExitWord word, std::string_view text)>;
// Returns a listener that writes each word as a line; empty if `fd` is -1.
ExitListener exit_line_writer(int fd);

// The supervisor's side of the pipe. Thread-compatible.
class ExitPipe {
 public:
  // kNoMemory if the system has no descriptor left.
  static Result<ExitPipe> open();

  int read_fd() const { return read_.get(); }
  int write_fd() const { return write_.get(); }
  // Call once the process has its copy of the writing end.
  void close_write() { write_.reset(); }

  // Reads the lines that are available, and ignores lines that write_exit_line() does not write. Never waits. Returns
  // false once no process has the writing end any more; a process that the dataset has forked may keep it open for
  // longer than the worker lives.
  bool read();

  bool has_served() const { return has_served_; }
  // The places of workers that have left before the process ends.
  const std::set<size_t>& left() const { return left_; }
  // Why the process ends; none until it has reported it.
  std::optional<ExitWord> end() const { return end_; }
  // For display; empty if there is none.
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
