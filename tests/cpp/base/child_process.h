// SPDX-License-Identifier: Apache-2.0
#pragma once
// A forked child that does something the test process must not: lower its limits, change its user, die. The child ends
// without running any destructor of the test.

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace penstock::test {

// Confined to the thread that made it.
class ChildProcess {
 public:
  // `body` runs in the child. It returns an empty text when all is well, and otherwise the fault.
  explicit ChildProcess(const std::function<std::string()>& body) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) ::_exit(1);
    pid_ = ::fork();
    if (pid_ == 0) run(ends[1], body);
    ::close(ends[1]);
    report_fd_ = ends[0];
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess() { static_cast<void>(join()); }

  pid_t pid() const { return pid_; }

  // Waits until the child has ended. Returns the text of its body, or how it ended instead. Blocks.
  std::string join() {
    if (pid_ < 0) return report_;
    char bytes[4096];
    for (ssize_t count = 0; (count = ::read(report_fd_, bytes, sizeof bytes)) != 0;) {
      if (count > 0) report_.append(bytes, static_cast<size_t>(count));
      if (count < 0 && errno != EINTR) break;
    }
    ::close(report_fd_);
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    if (WIFSIGNALED(status)) report_ += "killed by signal " + std::to_string(WTERMSIG(status));
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0) {
      report_ += "ended with status " + std::to_string(WEXITSTATUS(status));
    }
    return report_;
  }

 private:
  [[noreturn]] static void run(int report_fd, const std::function<std::string()>& body) {
    std::string report;
    try {
      report = body();
    } catch (const std::exception& error) {
      report = std::string("exception: ") + error.what();
    }
    const ssize_t written = ::write(report_fd, report.data(), report.size());
    ::_exit(written == static_cast<ssize_t>(report.size()) ? 0 : 2);
  }

  pid_t pid_ = -1;
  int report_fd_ = -1;
  std::string report_;
};

inline std::string in_child(const std::function<std::string()>& body) { return ChildProcess(body).join(); }

// A gate between two processes: one waits until the other opens it, and also passes when the other has died.
// Confined to one thread in each process.
class Gate {
 public:
  Gate() {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0) std::terminate();
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  void open() const {
    const char byte = 0;
    static_cast<void>(!::write(ends_[1], &byte, 1));
  }
  // Blocks. The waiting side closes its own copy of the writing end, which is what lets it see the other die.
  void pass() {
    ::close(std::exchange(ends_[1], -1));
    char byte = 0;
    while (::read(ends_[0], &byte, 1) < 0 && errno == EINTR) {
    }
  }

 private:
  std::array<int, 2> ends_{};
};

// From now on no file of this process may grow beyond `bytes`, and trying to is an error and not a signal.
inline void limit_file_size(rlim_t bytes) {
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
  ::setrlimit(RLIMIT_FSIZE, &limit);
}

// From now on this process can open so many more files. For the body of a child, which fails where that cannot be set.
inline void leave_descriptors(int count) {
  rlimit limit{};
  bool is_set = ::getrlimit(RLIMIT_NOFILE, &limit) == 0;
  limit.rlim_cur = limit.rlim_max;  // an earlier call may have left none to look with
  is_set = is_set && ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
  const int next_fd = ::dup(STDOUT_FILENO);  // all below it are in use
  ::close(next_fd);
  limit.rlim_cur = static_cast<rlim_t>(next_fd + count);
  is_set = is_set && ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
  if (!is_set) throw std::runtime_error("the limit of open files could not be set");
}

// Filters the system calls of this thread and of those that it starts, for as long as they live. False where the system
// has no filters.
inline bool filter_calls(std::span<sock_filter> filter) {
  const sock_fprog program{.len = static_cast<unsigned short>(filter.size()), .filter = filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// From now on the kernel answers every fallocate of this process with `error_number`, as it does when memory is short.
inline bool fail_fallocate(int error_number) {
  std::array<sock_filter, 4> filter = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error_number)),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  return filter_calls(filter);
}

// The same of every message that this thread, or one that it starts, sends over a socket.
inline bool fail_sendmsg(int fd, int error_number) {
  std::array<sock_filter, 6> filter = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sendmsg, 0, 3),
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),  // the first one, its lower half
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(fd), 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error_number)),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  return filter_calls(filter);
}

}  // namespace penstock::test
