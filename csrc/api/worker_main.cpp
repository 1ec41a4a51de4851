// SPDX-License-Identifier: Apache-2.0
#include "penstock/worker_main.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "api/memory_caps.h"
#include "api/process_log.h"
#include "api/torch_check.h"
#include "api/worker_options.h"
#include "api/worker_service.h"
#include "base/child_process.h"
#include "base/descriptor_limit.h"
#include "base/environment.h"
#include "base/identity.h"
#include "base/live_clock.h"
#include "net/key_folder.h"
#include "penstock/error.h"
#include "worker/malloc_tuning.h"
#include "worker/pool_server.h"
#include "worker/server_addresses.h"

namespace penstock {
namespace {

using api::ProcessLog;
using api::WorkerOptions;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kUsageExitCode = 2;
constexpr int kUselessExitCode = 78;  // sysexits.h's EX_CONFIG: another process would fare no better

sigset_t ending_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : {SIGTERM, SIGINT, SIGCHLD}) ::sigaddset(&set, number);
  return set;
}

// The next signal that came, or nothing within the time.
std::optional<int> wait_for_signal(milliseconds time) {
  const sigset_t set = ending_signals();
  const timespec timeout{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
  const int number = ::sigtimedwait(&set, nullptr, &timeout);
  return number > 0 ? std::optional(number) : std::nullopt;
}

// ---- One worker process

std::string about_this_process() {
  const TorchVersion torch;
  return host_name() + ", process " + std::to_string(::getpid()) + ", penstock " + PENSTOCK_VERSION +
         " (plug-ins), torch " + std::to_string(torch.major) + "." + std::to_string(torch.minor);
}

// What an option was given; none for one that was left out.
std::optional<std::string> given(const std::string& option) {
  return option.empty() ? std::nullopt : std::optional(option);
}

Result<std::unique_ptr<worker::PoolServer>> start_server(const WorkerOptions& options) {
  const bool is_own = options.mode == WorkerOptions::Mode::kOwn;
  auto read = worker::options_at({.bind = is_own ? "tcp://127.0.0.1:0" : options.bind,
                                  .controller = given(options.controller),
                                  .advertised = given(options.advertise),
                                  .data_bind = given(options.data_bind),
                                  .data_advertised = given(options.data_advertise),
                                  .key_folder = given(options.keys)});
  if (!read) return read.error();
  const auto arena = api::arena_bytes();
  if (!arena) return arena.error();
  const auto job = api::job_bytes();
  if (!job) return job.error();
  worker::PoolServerOptions of_server = std::move(read).value();
  of_server.about = about_this_process();
  of_server.job_kinds = wire::kind_bit(wire::JobKind::kPlugin);
  of_server.torch = wire::torch_number(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);
  of_server.arena_bytes = arena.value();
  of_server.blob_bytes_max = job.value();
  of_server.patience = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options.patience_s));
  of_server.parent_pid = options.parent_pid;
  of_server.handover = options.handover;
  return worker::PoolServer::start(std::move(of_server));
}

// A trainer that started this worker learns where it listens.
void report(int fd, const worker::PoolServer& server) {
  const std::string text = std::to_string(server.worker_id()) + " " + server.endpoint().text() + "\n";
  static_cast<void>(::write(fd, text.data(), text.size()) < 0);
  ::close(fd);
}

int serve(const WorkerOptions& options, ProcessLog& log) {
  worker::tune_malloc();
  const DescriptorLimit limit = raise_descriptor_limit();
  at::set_num_threads(1);
  auto server = start_server(options);
  if (!server) {
    log.tell(server.error().message);
    return kUselessExitCode;
  }
  worker::PoolServer& its = *server.value();
  const std::string id = spoken_id(its.worker_id());
  log.set_name("penstock-worker " + id.substr(0, 8));
  const bool is_own = options.mode == WorkerOptions::Mode::kOwn;
  if (options.report_fd >= 0) report(options.report_fd, its);
  // The native thread drains the worker, whatever the dataset does at the moment.
  const std::jthread signals([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const auto number = wait_for_signal(milliseconds(200));
      const auto byte = static_cast<char>(number.value_or(0));
      if (number && number != SIGCHLD) static_cast<void>(::write(its.signal_fd(), &byte, 1) < 0);
    }
  });
  // A trainer's own workers say nothing but what needs attention: their output is the trainer's.
  const api::WorkerSpeech speech{.say =
                                     [&](const std::string& text) {
                                       if (!is_own) log.say(text);
                                     },
                                 .tell = [&](const std::string& text) { log.tell(text); }};
  speech.say("listens at " + its.advertised() + " and for batches at " + its.data_advertised() + " for " +
             options.controller + ", id " + id + ", process " + std::to_string(::getpid()));
  if (limit.now != limit.before)
    speech.say("may have " + std::to_string(limit.now) + " files open; its limit was " + std::to_string(limit.before));
  if (limit.now < kDescriptorLimitLeast)
    speech.say("may have " + std::to_string(limit.now) + " files open, and " + std::to_string(kDescriptorLimitLeast) +
               " or more are recommended for connections and datasets; raise the hard limit (ulimit -Hn, LimitNOFILE "
               "of a systemd unit)");
  const auto served = api::serve_jobs(its, speech);
  if (served) return 0;
  log.tell(served.error().message);
  return kUselessExitCode;
}

// ---- Looking after several

class Supervised {
 public:
  Supervised(std::vector<std::string> command, ProcessLog& log) : command_(std::move(command)), log_(log) { start(); }

  bool is_due() const { return child_ || start_at_; }
  void end() {
    start_at_.reset();
    if (child_) child_->signal(SIGTERM);
  }

  // Starts it again after it died. True if another process would fare no better.
  bool look_after(bool is_ending) {
    if (child_) {
      const std::optional<ProcessEnd> end = child_->poll();
      if (end) {
        child_.reset();
        if (!is_ending && end->has_exit_code(kUselessExitCode)) return true;
        if (!is_ending && !end->has_exit_code(0)) start_later("a process " + end->spoken() + "; another one starts");
      }
    }
    if (start_at_ && *start_at_ <= steady_clock::now()) start();
    return false;
  }

 private:
  static constexpr milliseconds kPause{100};  // before a process that died is started again; doubled each time
  static constexpr milliseconds kPauseMax{5000};
  static constexpr milliseconds kLivedLong{30000};  // then the next pause is a short one again

  void start() {
    start_at_.reset();
    started_at_ = steady_clock::now();
    auto started = ChildProcess::start({.command = command_, .has_own_session = true});
    if (started)
      child_.emplace(std::move(started).value());
    else
      start_later(started.error().message + "; another try follows");
  }

  void start_later(const std::string& what) {
    if (steady_clock::now() - started_at_ >= kLivedLong) pause_ = kPause;
    start_at_ = steady_clock::now() + pause_;
    log_.tell(what + " in " + std::to_string(pause_.count()) + " ms");
    pause_ = std::min(2 * pause_, kPauseMax);
  }

  std::vector<std::string> command_;
  ProcessLog& log_;
  std::optional<ChildProcess> child_;
  std::optional<steady_clock::time_point> start_at_;
  steady_clock::time_point started_at_{};
  milliseconds pause_ = kPause;
};

int supervise(const WorkerOptions& options, ProcessLog& log) {
  const auto processes = api::options_of_processes(options);
  if (!processes) {
    log.tell(processes.error().message);
    return processes.error().code == Errc::kMalformed ? kUsageExitCode : kUselessExitCode;
  }
  if (const std::string warning = net::warning_of_workers_keys(options.keys); !warning.empty()) log.tell(warning);
  std::array<char, PATH_MAX> program{};
  if (::readlink("/proc/self/exe", program.data(), program.size() - 1) <= 0) return kUselessExitCode;
  std::vector<std::unique_ptr<Supervised>> children;
  for (WorkerOptions one : processes.value()) {
    one.parent_pid = ::getpid();
    std::vector<std::string> command = {program.data()};
    for (std::string& argument : api::to_arguments(one)) command.push_back(std::move(argument));
    children.push_back(std::make_unique<Supervised>(std::move(command), log));
  }
  int signal_count = 0;
  bool has_failed = false;
  const auto is_due = [](const auto& child) { return child->is_due(); };
  while (std::any_of(children.begin(), children.end(), is_due)) {
    const auto number = wait_for_signal(milliseconds(100));
    if (number && number != SIGCHLD) {
      ++signal_count;
      log.say(signal_count == 1 ? "draining after SIG" + std::string(::sigabbrev_np(*number)) +
                                      "; a second signal ends the processes at once"
                                : "ending the processes at once after a second signal");
      for (const auto& child : children) child->end();
    }
    for (const auto& child : children) has_failed = child->look_after(signal_count > 0) || has_failed;
  }
  return has_failed ? 1 : 0;
}

}  // namespace

int worker_main(int argument_count, char** arguments) {
  ProcessLog log("penstock-worker");
  const auto options = api::parse_worker_options({arguments + 1, arguments + argument_count});
  if (!options) {
    std::cerr << "penstock-worker: " << options.error().message
              << "\n`penstock-worker --help` tells how it is called.\n";
    return kUsageExitCode;
  }
  // For this thread and all that it starts: who waits for them takes them.
  const sigset_t set = ending_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // NOLINT(concurrency-mt-unsafe): there is no other thread yet
  ::signal(SIGCHLD, SIG_DFL);  // NOLINT(concurrency-mt-unsafe): whoever started it may have ignored it
  switch (options.value().mode) {
    case WorkerOptions::Mode::kHelp: std::cout << api::worker_usage(); return 0;
    case WorkerOptions::Mode::kVersion: std::cout << "penstock-worker " << PENSTOCK_VERSION << "\n"; return 0;
    case WorkerOptions::Mode::kSupervise: return supervise(options.value(), log);
    case WorkerOptions::Mode::kServe:
    case WorkerOptions::Mode::kOwn: break;
  }
  try {
    api::check_torch({}, "penstock-worker");
  } catch (const Error& error) {
    log.tell(error.what());
    return kUselessExitCode;
  }
  return serve(options.value(), log);
}

}  // namespace penstock
