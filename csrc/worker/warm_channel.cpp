// SPDX-License-Identifier: Apache-2.0
#include "worker/warm_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <torch/headeronly/version.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <span>
#include <utility>
#include <vector>

#include "base/child_process.h"
#include "runtime/numeric_fingerprint.h"
#include "wire/reports.h"

namespace penstock::worker {

using wire::WarmMessage;

namespace {

constexpr int kLookIntervalMs = 100;  // between checks of the job processes, on systems without process handles
constexpr std::chrono::seconds kStraysMax{1};  // time for strays to end; one may wait for a dead disk

}  // namespace

WarmChannel::WarmChannel(FileDescriptor socket) : channel_(std::move(socket)) {
  ::fcntl(channel_.fd(), F_SETFD, FD_CLOEXEC);
}

Result<void> WarmChannel::ready(uint8_t job_kinds, const std::string& about) {
  return send({.kind = WarmMessage::Kind::kReady,
               .torch = wire::torch_number(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR),
               .job_kinds = job_kinds,
               .numerics = runtime::numeric_fingerprint(),
               .text = std::string_view(about).substr(0, wire::kAboutBytesMax)});
}

Result<std::variant<WarmChannel::Order, WarmChannel::End>> WarmChannel::next() {
  using Next = std::variant<Order, End>;
  for (;;) {
    if (const auto end = reap()) return Next(*end);
    if (are_strays_left_) end_strays();
    auto received = channel_.next();
    if (received && !received.value()) {
      const auto filled = channel_.fill();
      if (filled && filled.value()) continue;
      if (filled) {
        wait();
        continue;
      }
      received = filled.error();
    }
    if (!received) {
      end_all();
      return received.error();
    }
    auto& message = *received.value();
    const auto told = wire::parse_warm_message(message.bytes);
    if (!told) return told.error();
    const WarmMessage& order = told.value();
    if (order.kind == WarmMessage::Kind::kFork && message.fds.size() == 2)
      return Next(Order{.job = order.job,
                        .channel = std::move(message.fds[0]),
                        .errors = std::move(message.fds[1]),
                        .log_name = std::string(order.text)});
    const auto process = processes_.find(order.job);
    if (order.kind == WarmMessage::Kind::kEnd && process != processes_.end()) end_session(process->second);
  }
}

// Waits until the server sends a message or a process ends.
void WarmChannel::wait() {
  std::vector<FileDescriptor> handles;
  std::vector<pollfd> items{{.fd = channel_.fd(), .events = POLLIN, .revents = 0}};
  bool has_all = !are_strays_left_;
  for (const auto& [job, pid] : processes_) {
    handles.push_back(open_process_handle(pid));
    has_all = has_all && handles.back();
    items.push_back({.fd = handles.back().get(), .events = POLLIN, .revents = 0});
  }
  ::poll(items.data(), items.size(), has_all ? -1 : kLookIntervalMs);
}

// An ended process remains an unreaped child until its session is ended, so its pid cannot be reused before.
std::optional<WarmChannel::End> WarmChannel::reap() {
  for (auto process = processes_.begin(); process != processes_.end(); ++process) {
    const auto [job, pid] = *process;
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0) continue;
    end_session(pid);
    int status = 0;
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    processes_.erase(process);
    end_strays();
    static_cast<void>(send({.kind = WarmMessage::Kind::kEnded, .job = job, .pid = pid, .status = status}));
    return End{.job = job};
  }
  return std::nullopt;
}

// Ends processes left behind by ended job processes. Running job processes adopt what their children leave.
void WarmChannel::end_strays() {
  std::vector<pid_t> own;
  for (const auto& [job, pid] : processes_) own.push_back(pid);
  are_strays_left_ = !strays_.end_all_but(own, std::chrono::steady_clock::now() + kStraysMax);
}

// The process has started a session once it runs; before that, it is alone.
void WarmChannel::end_session(pid_t pid) {
  ::kill(-pid, SIGKILL);
  ::kill(pid, SIGKILL);
}

void WarmChannel::end_all() {
  for (const auto& [job, pid] : processes_) end_session(pid);
  for (const auto& [job, pid] : processes_) {
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  processes_.clear();
  end_strays();
}

Result<void> WarmChannel::started(uint64_t job, pid_t pid) {
  if (pid == 0) return send({.kind = WarmMessage::Kind::kEnded, .job = job});
  processes_.emplace(job, pid);
  return send({.kind = WarmMessage::Kind::kStarted, .job = job, .pid = pid});
}

void WarmChannel::close_in_child() {
  channel_ = shm::Channel(FileDescriptor());
  processes_.clear();
  adopt_orphans();
}

Result<void> WarmChannel::send(const WarmMessage& message) {
  const auto bytes = wire::write_warm_message(message);
  const std::span<const std::byte> part(bytes);
  return channel_.send({&part, 1});
}

}  // namespace penstock::worker
