// SPDX-License-Identifier: Apache-2.0
#include "penstock/worker_main.h"

#include <ATen/Parallel.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "api/surroundings.h"
#include "api/worker_options.h"
#include "api/worker_service.h"
#include "base/child_process.h"
#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/process.h"
#include "net/key_folder.h"
#include "penstock/error.h"
#include "server/server_program.h"
#include "worker/batch_server.h"
#include "worker/process_memory.h"

namespace penstock {
namespace {

using api::ServerSettings;
using api::WorkerOptions;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kUsageExitCode = 2;
constexpr std::chrono::seconds kStraysMax{1};  // for processes that an ended server left behind to end

sigset_t ending_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : {SIGTERM, SIGINT, SIGCHLD}) ::sigaddset(&set, number);
  return set;
}

// The next pending signal; no value if none arrives within the time.
std::optional<int> wait_for_signal(milliseconds time) {
  const sigset_t set = ending_signals();
  const timespec timeout{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
  const int number = ::sigtimedwait(&set, nullptr, &timeout);
  return number > 0 ? std::optional(number) : std::nullopt;
}

// ---- A trainer's own worker, which is a single process

Result<std::unique_ptr<worker::PoolServer>> start_server(const WorkerOptions& options) {
  auto read = server::options_at({.bind = "tcp://127.0.0.1:0"});
  if (!read) return read.error();
  const auto arena = api::arena_bytes();
  if (!arena) return arena.error();
  const auto job = api::job_bytes();
  if (!job) return job.error();
  server::PoolServerOptions of_server = std::move(read).value();
  of_server.about = api::about_worker(::getpid());
  of_server.job_kinds = wire::kind_bit(wire::JobKind::kPlugin);
  of_server.torch = wire::torch_number(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);
  of_server.arena_bytes = arena.value();
  of_server.blob_bytes_max = job.value();
  of_server.parent_pid = options.parent_pid;
  of_server.handover = options.handover;
  return worker::PoolServer::start(std::move(of_server));
}

// Reports the listening address to the trainer that started this worker.
void report(int fd, const worker::PoolServer& server) {
  const std::string text = std::to_string(server.worker_id()) + " " + server.endpoint().text() + "\n";
  static_cast<void>(::write(fd, text.data(), text.size()) < 0);
  ::close(fd);
}

int serve_trainer(const WorkerOptions& options, ProcessLog& log) {
  worker::tune_malloc();
  static_cast<void>(raise_descriptor_limit());
  at::set_num_threads(1);
  auto server = start_server(options);
  if (!server) {
    log.tell(server.error().message);
    return EXIT_FAILURE;
  }
  worker::PoolServer& its = *server.value();
  log.set_name("penstock-worker " + format_id(its.worker_id()).substr(0, 8));
  if (options.report_fd >= 0) report(options.report_fd, its);
  // The native thread drains the worker, even while the dataset is busy.
  const std::jthread signals([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const auto number = wait_for_signal(milliseconds(200));
      const auto byte = static_cast<char>(number.value_or(0));
      if (number && number != SIGCHLD) static_cast<void>(::write(its.signal_fd(), &byte, 1) < 0);
      if (number == SIGCHLD) forget_ended_children();
    }
  });
  // Logs only messages that need attention: its output is the trainer's.
  const auto served = api::serve_jobs(
      its, {.say = [](const std::string&) {}, .tell = [&](const std::string& text) { log.tell(text); }});
  if (served) return 0;
  log.tell(served.error().message);
  return EXIT_FAILURE;
}

// ---- Supervision of servers

// One penstock-server, and all processes of its workers.
class Supervised {
 public:
  // All workers of a server have the same options except for their addresses.
  Supervised(std::string program, std::vector<WorkerOptions> workers, ServerSettings settings, ProcessLog& log)
      : program_(std::move(program)),
        grace_(duration_of(workers.front().grace_s)),
        workers_(std::move(workers)),
        settings_(std::move(settings)),
        log_(log) {
    start();
  }

  bool is_due() const { return child_ || start_at_; }
  std::optional<pid_t> pid() const { return child_ ? std::optional(child_->pid()) : std::nullopt; }
  // Asks it to leave. It is killed if it has not ended in time.
  void end() {
    start_at_.reset();
    if (child_) child_->signal(SIGTERM);
    kill_within(grace_ + kExitMax);
  }
  void kill() {
    if (child_) child_->signal(SIGKILL);
  }

  // Restarts it after it ended, unless it was asked to leave. Returns true if a restart would fail in the same way.
  bool look_after(bool is_ending) {
    if (child_) {
      const bool has_ended = child_->poll().has_value();  // its last report is in the pipe by then
      const bool had_reported = pipe_->end().has_value();
      static_cast<void>(pipe_->read());
      if (pipe_->end() && !had_reported) kill_within(kExitMax);
      if (has_ended && take_end(is_ending)) return true;
    }
    if (child_) kill_if_late();
    if (start_at_ && *start_at_ <= steady_clock::now()) start();
    return false;
  }

 private:
  static constexpr milliseconds kPause{100};  // before a process that died is restarted; doubled each time
  static constexpr milliseconds kPauseMax{5000};
  static constexpr milliseconds kLivedLong{30000};  // after such a lifetime the next pause is short again
  static constexpr milliseconds kExitMax{10000};    // for a process that has reported why it ends

  void start() {
    start_at_.reset();
    started_at_ = steady_clock::now();
    auto pipe = ExitPipe::open();
    if (!pipe) return start_later(pipe.error().message + "; retrying");
    settings_.exit_fd = pipe.value().write_fd();
    std::vector<std::string> command = {program_};
    for (std::string& argument : api::server_arguments(workers_, settings_)) command.push_back(std::move(argument));
    auto started =
        ChildProcess::start({.command = std::move(command), .passed_fd = settings_.exit_fd, .has_own_session = true});
    if (!started) return start_later(started.error().message + "; retrying");
    pipe.value().close_write();
    pipe_.emplace(std::move(pipe).value());
    child_.emplace(std::move(started).value());
  }

  bool take_end(bool is_ending) {
    const auto word = pipe_->end();
    const bool has_reported = !pipe_->text().empty();
    const std::string how = "a process " + child_->poll()->describe() + (has_reported ? ": " + pipe_->text() : "");
    // Workers that have left are not started again.
    for (auto place = pipe_->left().rbegin(); place != pipe_->left().rend(); ++place)
      if (*place < workers_.size()) workers_.erase(workers_.begin() + static_cast<ptrdiff_t>(*place));
    // If one has served before, its port may not be free yet.
    const bool is_useless = word == ExitWord::kUseless && (pipe_->has_served() || !has_served_);
    has_served_ = has_served_ || pipe_->has_served();
    child_.reset();
    pipe_.reset();
    kill_at_.reset();
    if (is_ending || word == ExitWord::kDrained || workers_.empty()) {
      if (has_reported) log_.tell(how);
      return false;
    }
    if (!is_useless) start_later(how + "; another one starts");
    return is_useless;
  }

  // An earlier deadline stays.
  void kill_within(Duration time) {
    const auto at = steady_clock::now() + time;
    kill_at_ = std::min(at, kill_at_.value_or(at));
  }

  void kill_if_late() {
    if (!kill_at_ || steady_clock::now() < *kill_at_) return;
    log_.say("process " + std::to_string(child_->pid()) + " did not exit in time and is killed");
    kill();
    kill_at_.reset();
  }

  void start_later(const std::string& what) {
    if (steady_clock::now() - started_at_ >= kLivedLong) pause_ = kPause;
    start_at_ = steady_clock::now() + pause_;
    log_.tell(what + " in " + std::to_string(pause_.count()) + " ms");
    pause_ = std::min(2 * pause_, kPauseMax);
  }

  const std::string program_;
  const Duration grace_;  // of its workers
  std::vector<WorkerOptions> workers_;
  ServerSettings settings_;
  ProcessLog& log_;
  std::optional<ChildProcess> child_;
  std::optional<ExitPipe> pipe_;  // of the child
  bool has_served_ = false;       // at least one process before the child has served
  std::optional<steady_clock::time_point> start_at_;
  std::optional<steady_clock::time_point> kill_at_;
  steady_clock::time_point started_at_{};
  milliseconds pause_ = kPause;
};

// The folder that jobs must not reach; empty if there is none, which the server reports.
std::string key_folder_of(const WorkerOptions& options) {
  std::string folder = options.keys;
  if (folder.empty()) {
    auto shared = net::shared_key_folder();
    if (shared) folder = std::move(shared).value();
  }
  std::array<char, PATH_MAX> real{};
  return ::realpath(folder.c_str(), real.data()) != nullptr ? std::string(real.data()) : folder;
}

// The server adds the descriptor of its channel.
Result<ServerSettings> settings_of_servers(const WorkerOptions& options) {
  const auto arena = api::arena_bytes();
  if (!arena) return arena.error();
  const auto job = api::job_bytes();
  if (!job) return job.error();
  std::array<char, PATH_MAX> program{};
  if (::readlink("/proc/self/exe", program.data(), program.size() - 1) <= 0)
    return Fault{Errc::kFailed,
                 std::string("/proc/self/exe, the path of this program, cannot be read: ") + std::strerror(errno)};
  return ServerSettings{.arena_bytes = arena.value(),
                        .blob_bytes = job.value(),
                        .warm_command = {program.data(), "--keys", key_folder_of(options), "--warm"}};
}

int supervise(const WorkerOptions& options, ProcessLog& log) {
  const auto workers = api::options_of_workers(options);
  const auto settings = workers ? settings_of_servers(options) : Result<ServerSettings>(workers.error());
  if (!settings) {
    log.tell(settings.error().message);
    return settings.error().code == Errc::kMalformed ? kUsageExitCode : EXIT_FAILURE;
  }
  if (const std::string warning = net::warning_of_workers_keys(options.keys); !warning.empty()) log.tell(warning);
  const std::string program = api::program_next_to_library("penstock-server");
  if (::access(program.c_str(), X_OK) != 0) {
    log.tell("the program that serves pool trainers, " + program +
             ", is not in the folder of libpenstock.so or cannot be run; reinstall penstock");
    return EXIT_FAILURE;
  }
  StrayProcesses strays;
  Supervised server(program, workers.value(), settings.value(), log);
  int signal_count = 0;
  bool has_failed = false;
  // Ends the processes that an ended server left behind; a running server adopts its children's.
  const auto end_strays = [&] {
    std::vector<pid_t> own;
    if (const auto pid = server.pid()) own.push_back(*pid);
    static_cast<void>(strays.end_all_but(own, steady_clock::now() + kStraysMax));
  };
  while (server.is_due()) {
    const auto number = wait_for_signal(milliseconds(100));
    if (number && number != SIGCHLD) {
      ++signal_count;
      log.say(signal_count == 1 ? "draining after SIG" + std::string(::sigabbrev_np(*number)) +
                                      "; a second signal ends the processes immediately"
                                : "ending the processes immediately after a second signal");
      if (signal_count == 1)
        server.end();
      else
        server.kill();
    }
    has_failed = server.look_after(signal_count > 0) || has_failed;
    if (number == SIGCHLD) end_strays();
  }
  end_strays();
  return has_failed ? 1 : 0;
}

}  // namespace

int worker_main(int argument_count, char** arguments) {
  ProcessLog log("penstock-worker");
  const auto options = api::parse_worker_options({arguments + 1, arguments + argument_count});
  if (!options) {
    std::cerr << "penstock-worker: " << options.error().message << "\n`penstock-worker --help` shows the usage.\n";
    return kUsageExitCode;
  }
  switch (options.value().mode) {
    case WorkerOptions::Mode::kHelp: std::cout << api::worker_usage(); return 0;
    case WorkerOptions::Mode::kVersion: std::cout << "penstock-worker " << PENSTOCK_VERSION << "\n"; return 0;
    case WorkerOptions::Mode::kSupervise:
    case WorkerOptions::Mode::kWarm:
    case WorkerOptions::Mode::kOwn: break;
  }
  try {
    api::check_torch({}, "penstock-worker");
  } catch (const Error& error) {
    log.tell(error.what());
    return EXIT_FAILURE;
  }
  if (options.value().mode == WorkerOptions::Mode::kWarm)
    return api::run_warm_worker(FileDescriptor(options.value().warm_fd), options.value().keys);
  // For this thread and all threads that it starts: a thread receives the signals by waiting for them.
  const sigset_t set = ending_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // NOLINT(concurrency-mt-unsafe): there is no other thread yet
  ::signal(SIGCHLD, SIG_DFL);  // NOLINT(concurrency-mt-unsafe): the parent process may have ignored it
  if (options.value().mode == WorkerOptions::Mode::kSupervise) return supervise(options.value(), log);
  adopt_orphans();  // so that processes left by a plug-in end with this one
  return serve_trainer(options.value(), log);
}

}  // namespace penstock
