// SPDX-License-Identifier: Apache-2.0
#include "base/child_process.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/file_descriptor.h"

extern "C" char** environ;  // NOLINT(readability-redundant-declaration)

namespace penstock {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kKilledMax = std::chrono::seconds(5);   // a process that waits for a dead disk cannot be killed
constexpr milliseconds kLookInterval{2};               // between checks of a process without a handle
constexpr auto kPidHandle = static_cast<idtype_t>(3);  // P_PIDFD, which older headers lack

// The status as waitpid() would return it.
int status_of(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) return W_EXITCODE(info.si_status, 0);
  return W_EXITCODE(0, info.si_status) | (info.si_code == CLD_DUMPED ? WCOREFLAG : 0);
}

// Waits until `fd` is readable. Returns false at the deadline.
bool wait_readable_until(int fd, steady_clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    pollfd item{.fd = fd, .events = POLLIN, .revents = 0};
    if (::poll(&item, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1'000'000))) > 0) return true;
    if (left.count() <= 0) return false;  // a signal does not end the wait
  }
}

}  // namespace

std::string ProcessEnd::describe() const {
  if (!status) return "ended (exit status unknown: this program ignores SIGCHLD, or waits for its children itself)";
  if (WIFEXITED(*status)) return "ended with exit code " + std::to_string(WEXITSTATUS(*status));
  const int number = WTERMSIG(*status);
  const char* name = ::sigabbrev_np(number);
  std::string text = "was ended by SIG" + std::string(name != nullptr ? name : std::to_string(number));
  if (number == SIGKILL) text += ", as the system does when memory runs out";
  return text;
}

Result<ChildProcess> ChildProcess::start(const Settings& settings) {
  std::vector<char*> arguments;
  for (const std::string& argument : settings.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  // Duplicating it onto itself clears its close-on-exec flag.
  if (settings.passed_fd >= 0) ::posix_spawn_file_actions_adddup2(&actions, settings.passed_fd, settings.passed_fd);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  sigset_t all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  short flags = POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF;
  if (settings.has_own_session) flags |= POSIX_SPAWN_SETSID;
  ::posix_spawnattr_setflags(&attributes, flags);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, arguments[0], &actions, &attributes, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0) return Fault{Errc::kFailed, settings.command[0] + " cannot be started: " + std::strerror(error)};
  return ChildProcess(pid);
}

FileDescriptor open_process_handle(pid_t pid) {
  return FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// The pid cannot be reused before the handle is open: pids are assigned in sequence.
ChildProcess::ChildProcess(pid_t pid) : pid_(pid), owner_pid_(::getpid()), handle_(open_process_handle(pid)) {}
ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      owner_pid_(other.owner_pid_),
      handle_(std::move(other.handle_)),
      end_(other.end_) {}
ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this == &other) return *this;
  end();
  pid_ = std::exchange(other.pid_, -1);
  owner_pid_ = other.owner_pid_;
  handle_ = std::move(other.handle_);
  end_ = other.end_;
  return *this;
}
ChildProcess::~ChildProcess() { end(); }

// In a forked child the process belongs to the parent.
void ChildProcess::end() {
  if (pid_ < 0 || owner_pid_ != ::getpid() || poll()) return;
  signal(SIGKILL);
  static_cast<void>(wait_until(steady_clock::now() + kKilledMax));
}

const std::optional<ProcessEnd>& ChildProcess::poll() {
  if (end_ || pid_ < 0) return end_;
  siginfo_t info{};
  int waited = handle_ ? ::waitid(kPidHandle, static_cast<id_t>(handle_.get()), &info, WEXITED | WNOHANG) : -1;
  if (waited != 0 && (!handle_ || errno == EINVAL))  // Linux 5.3 creates handles, but cannot wait for them
    waited = ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG);
  if (waited == 0 && info.si_pid != 0) end_ = ProcessEnd{.status = status_of(info)};
  if (waited != 0 && errno == ECHILD) end_ = ProcessEnd{};
  return end_;
}

void ChildProcess::signal(int number) {
  if (pid_ < 0 || poll()) return;
  if (handle_ && ::syscall(SYS_pidfd_send_signal, handle_.get(), number, nullptr, 0) == 0) return;
  // Without a handle: a child that was not waited for yet keeps its pid.
  if (!handle_ || errno == ENOSYS || errno == EPERM) ::kill(pid_, number);
}

bool ChildProcess::wait_until(Deadline deadline) {
  while (!poll()) {
    if (steady_clock::now() >= deadline) return false;
    if (handle_) {
      static_cast<void>(wait_readable_until(handle_.get(), deadline));
    } else {
      std::this_thread::sleep_until(std::min(deadline, steady_clock::now() + kLookInterval));
    }
  }
  return true;
}

Result<std::string> read_line_until(int fd, ChildProcess::Deadline deadline) {
  std::string line;
  while (wait_readable_until(fd, deadline)) {
    char c = 0;
    const ssize_t count = ::read(fd, &c, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0)
      return Fault{Errc::kClosed, "the other end of a pipe was closed before a complete line was received"};
    if (c == '\n') return line;
    line += c;
  }
  return Fault{Errc::kTimeout, "no line was received from a pipe before the deadline"};
}

namespace {

static_assert(kExitLineBytesMax <= PIPE_BUF);

constexpr std::array kExitWords = {ExitWord::kServing, ExitWord::kLeft, ExitWord::kDrained, ExitWord::kUseless,
                                   ExitWord::kFailed};
constexpr size_t kPlaceMax = 1 << 16;  // more workers than any process has
constexpr int kReadCountMax = 32;      // per call, so that a process that floods the pipe does not hold up others

}  // namespace

std::string_view name_of(ExitWord word) {
  switch (word) {
    case ExitWord::kServing: return "serving";
    case ExitWord::kLeft: return "left";
    case ExitWord::kDrained: return "drained";
    case ExitWord::kUseless: return "useless";
    case ExitWord::kFailed: return "failed";
  }
  return "";
}

std::optional<ExitWord> exit_word_named(std::string_view name) {
  for (const ExitWord word : kExitWords)
    if (name_of(word) == name) return word;
  return std::nullopt;
}

void write_exit_line(int fd, ExitWord word, std::string_view text) {
  if (fd < 0) return;
  std::string line(name_of(word));
  if (!text.empty()) line.append(" ").append(text);
  line.resize(std::min(line.size(), kExitLineBytesMax - 1));
  std::replace(line.begin(), line.end(), '\n', ' ');
  line += '\n';
  static_cast<void>(::write(fd, line.data(), line.size()) < 0);
}

ExitListener exit_line_writer(int fd) {
  if (fd < 0) return {};
  return [fd](ExitWord word, std::string_view text) { write_exit_line(fd, word, text); };
}

Result<ExitPipe> ExitPipe::open() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0)
    return Fault{Errc::kNoMemory, std::string("opening a pipe failed: ") + std::strerror(errno)};
  return ExitPipe(FileDescriptor(ends[0]), FileDescriptor(ends[1]));
}

ExitPipe::ExitPipe(FileDescriptor read, FileDescriptor write) : read_(std::move(read)), write_(std::move(write)) {}

bool ExitPipe::read() {
  std::array<char, 4096> bytes{};
  for (int turn = 0; turn < kReadCountMax; ++turn) {
    const ssize_t count = ::read(read_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN;
    if (count == 0) return false;
    std::string_view left(bytes.data(), static_cast<size_t>(count));
    for (size_t end = left.find('\n'); end != std::string_view::npos; end = left.find('\n')) {
      unfinished_ += left.substr(0, end);
      take(unfinished_);
      unfinished_.clear();
      left.remove_prefix(end + 1);
    }
    unfinished_ += left;
    if (unfinished_.size() >= kExitLineBytesMax) unfinished_.clear();  // not one of our lines
  }
  return true;
}

void ExitPipe::take(std::string_view line) {
  const size_t space = std::min(line.find(' '), line.size());
  const auto word = exit_word_named(line.substr(0, space));
  if (!word) return;
  if (*word == ExitWord::kServing) {
    has_served_ = true;
    return;
  }
  const std::string_view text = line.substr(std::min(space + 1, line.size()));
  if (*word == ExitWord::kLeft) {
    size_t place = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), place);
    if (error == std::errc() && end == text.data() + text.size() && place < kPlaceMax) left_.insert(place);
    return;
  }
  end_ = word;
  text_ = text;
}

namespace {

constexpr milliseconds kStrayCheckInterval{2};  // between checks of a process without a handle
constexpr const char* kOwnThreads = "/proc/self/task/";

// Returns none if the file cannot be read.
std::optional<std::string> text_of_file(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::string text;
  for (;;) {
    std::array<char, 4096> piece{};
    const ssize_t count = ::read(file.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return std::nullopt;
    if (count == 0) return text;
    text.append(piece.data(), static_cast<size_t>(count));
  }
}

// The entries of a folder of /proc that are numbers.
std::vector<pid_t> numbers_in(const char* folder) {
  std::vector<pid_t> numbers;
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder), ::closedir);
  if (!open) return numbers;
  while (const dirent* entry = ::readdir(open.get())) {  // NOLINT(concurrency-mt-unsafe): the folder is its own
    const std::string_view name = entry->d_name;
    pid_t number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error == std::errc() && end == name.data() + name.size()) numbers.push_back(number);
  }
  return numbers;
}

void add_numbers(std::string_view text, std::vector<pid_t>& numbers) {
  while (!text.empty()) {
    pid_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc()) numbers.push_back(number);
    text.remove_prefix(std::min(text.size(), static_cast<size_t>(end - text.data()) + 1));
  }
}

// The format of /proc/PID/stat: "PID (NAME) STATE PARENT ...", where NAME may be any text.
pid_t parent_in(std::string_view status) {
  const size_t name_end = status.rfind(')');
  if (name_end == std::string_view::npos || name_end + 4 > status.size()) return -1;
  status.remove_prefix(name_end + 4);
  pid_t parent = -1;
  std::from_chars(status.data(), status.data() + status.size(), parent);
  return parent;
}

enum class ChildState : uint8_t { kNone, kRuns, kHasEnded };

ChildState state_of(idtype_t kind, pid_t pid) {
  siginfo_t info{};
  if (::waitid(kind, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT | __WALL) != 0)
    return ChildState::kNone;
  return info.si_pid != 0 ? ChildState::kHasEnded : ChildState::kRuns;
}

// Waits for a child that was killed. Returns false at the deadline.
bool wait_for_killed(pid_t pid, steady_clock::time_point deadline) {
  const FileDescriptor handle = open_process_handle(pid);
  for (;;) {
    const pid_t waited = ::waitpid(pid, nullptr, WNOHANG | __WALL);
    if (waited == pid || (waited < 0 && errno != EINTR)) return true;
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd item{.fd = handle.get(), .events = POLLIN, .revents = 0};
    ::poll(&item, 1, static_cast<int>(handle ? left.count() : kStrayCheckInterval.count()));
  }
}

}  // namespace

void adopt_orphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

std::vector<pid_t> own_threads() { return numbers_in(kOwnThreads); }

std::vector<pid_t> child_processes() {
  std::vector<pid_t> children;
  if (state_of(P_ALL, 0) == ChildState::kNone) return children;
  if (::access("/proc/thread-self/children", R_OK) == 0) {
    for (const pid_t thread : own_threads())
      add_numbers(text_of_file(kOwnThreads + std::to_string(thread) + "/children").value_or(""), children);
    return children;
  }
  // The kernel was built without these lists.
  const pid_t self = ::getpid();
  for (const pid_t pid : numbers_in("/proc"))
    if (parent_in(text_of_file("/proc/" + std::to_string(pid) + "/stat").value_or("")) == self) children.push_back(pid);
  return children;
}

StrayProcesses::StrayProcesses() {
  adopt_orphans();
  const std::vector<pid_t> children = child_processes();
  kept_.insert(children.begin(), children.end());
}

// The pid of a child that was not waited for is not reused, so the signal cannot reach another process.
bool StrayProcesses::end_all_but(std::span<const pid_t> own, Deadline deadline) {
  std::set<pid_t> kept = kept_;
  kept.insert(own.begin(), own.end());
  for (;;) {
    std::vector<pid_t> strays = child_processes();
    std::erase_if(strays, [&](pid_t pid) { return kept.contains(pid) || state_of(P_PID, pid) == ChildState::kNone; });
    if (strays.empty()) return true;
    for (const pid_t pid : strays)
      if (::kill(pid, SIGKILL) != 0) kept.insert(pid);
    for (const pid_t pid : strays)
      if (!kept.contains(pid) && !wait_for_killed(pid, deadline)) return false;
  }
}

void forget_ended_children(size_t kept) {
  if (state_of(P_ALL, 0) != ChildState::kHasEnded) return;
  std::vector<pid_t> ended = child_processes();
  std::erase_if(ended, [](pid_t pid) { return state_of(P_PID, pid) != ChildState::kHasEnded; });
  for (size_t place = 0; place + kept < ended.size(); ++place) ::waitpid(ended[place], nullptr, WNOHANG | __WALL);
}

}  // namespace penstock
