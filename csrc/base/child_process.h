// SPDX-License-Identifier: Apache-2.0
#pragma once
// Processes below this one. ChildProcess is a program that this process starts and waits for; an ExitPipe carries the
// reason why such a program, if it is a pool's worker, ends; StrayProcesses ends the processes that a program leaves
// running.

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock {

// How a process ended.
struct ProcessEnd {
  // As returned by waitpid(); none if this process has waited for it elsewhere, or ignores SIGCHLD.
  std::optional<int> status{};

  // A phrase that follows the name of a process: "ended with exit code 1", "was ended by SIGKILL, ...".
  std::string describe() const;
};

// Opens a handle of a process that becomes readable when the process has ended. Empty if the process is gone or the
// system provides no handle; errno has the reason.
FileDescriptor open_process_handle(pid_t pid);

// A program that this process starts and waits for, regardless of what else the process does: it may ignore SIGCHLD or
// wait for all of its children itself, and may receive signals at any rate. The program is therefore identified by a
// handle (a pidfd) and not by its pid, which may have been reused, and a signal does not shorten a wait: it lasts until
// its deadline. The destructor kills a process that still runs, by SIGKILL. Thread-compatible.
class ChildProcess {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  struct Settings {
    std::vector<std::string> command{};  // the program, which is searched for on PATH, and its arguments
    int passed_fd = -1;                  // a descriptor that the program inherits under the same number
    bool has_own_session = false;        // Ctrl-C at a terminal does not reach it
  };
  // kFailed with the system's message if it cannot be started.
  static Result<ChildProcess> start(const Settings& settings);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // How it ended, once it has ended.
  const std::optional<ProcessEnd>& poll();
  void signal(int number);
  // Waits for its end. Returns false if it still runs at the deadline. Blocks.
  [[nodiscard]] bool wait_until(Deadline deadline);

 private:
  explicit ChildProcess(pid_t pid);
  void end();

  pid_t pid_;
  pid_t owner_pid_;
  FileDescriptor handle_;  // none before Linux 5.3, or where the system refuses one
  std::optional<ProcessEnd> end_;
};

// Reads a line from a pipe byte by byte and returns it without its newline. kClosed if the other end is closed before
// the newline, kTimeout at the deadline. Blocks.
Result<std::string> read_line_until(int fd, ChildProcess::Deadline deadline);

// The word by which a pool's worker process reports to its supervisor why it ends: over a pipe that only penstock's
// code writes to, and never by an exit code, which the dataset that runs in the process may choose. wire/PROTOCOL.md
// specifies the lines.
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

// The supervisor's side of the pipe over which a worker writes these lines. Thread-compatible.
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

// From now on, descendants of this process whose parent has ended become its children, unless a process in between
// adopts them. A forked child does not inherit this setting, but may set it for itself.
void adopt_orphans();

// The threads of this process; none if the system does not list them.
std::vector<pid_t> own_threads();

// The children of this process, of all its threads, including ended children that were not waited for.
std::vector<pid_t> child_processes();

// Ends the processes that a program leaves running: processes that it has started in separate sessions, and their
// descendants. No process group or session contains all of them, but a parent does. A child subreaper becomes the
// parent of every descendant whose parent ends, and so finds them among its children. Children that it has not started
// are ended. Confined to one thread at a time.
class StrayProcesses {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Adopts orphans from now on. Children that the process already has do not count as strays: a shell may have left
  // them to the program that replaced it by exec().
  StrayProcesses();

  // Kills and waits for all children except `own`, and then for the processes that these leave behind. Returns false if
  // some have not ended at the deadline. A process that this one may not signal is left alone. Blocks.
  [[nodiscard]] bool end_all_but(std::span<const pid_t> own, Deadline deadline);

 private:
  std::set<pid_t> kept_;
};

// This many ended children are left to the code that started them, which may still wait for them.
constexpr size_t kEndedChildrenMax = 256;

// Waits for ended children of this process, oldest first, if there are more than `kept` of them. Adopted children stay
// until they are waited for, and use a process number each; they cannot be distinguished from other children.
void forget_ended_children(size_t kept = kEndedChildrenMax);

}  // namespace penstock
