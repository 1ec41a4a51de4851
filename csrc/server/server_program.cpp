// SPDX-License-Identifier: Apache-2.0
#include "server/server_program.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <stop_token>
#include <string_view>
#include <thread>
#include <utility>

#include "base/descriptor_limit.h"
#include "base/event_loop.h"
#include "base/exit_pipe.h"
#include "base/identity.h"
#include "base/instant.h"
#include "base/process_log.h"
#include "net/keys.h"
#include "server/job_host.h"
#include "server/pool_server_io.h"
#include "server/warm_process.h"
#include "server/watched_process.h"

namespace penstock::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kUsageExitCode = 2;
constexpr milliseconds kLook{200};  // at notices, and at whether the parent is there
// To import what every job needs, from a disk that is slow and on a machine that is busy.
constexpr auto kWarmMax = std::chrono::minutes(10);

template <typename Number>
bool read_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number >= Number{0} &&
         number <= std::numeric_limits<Number>::max();
}

sigset_t signals_to_drain() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : {SIGTERM, SIGINT}) ::sigaddset(&set, number);
  return set;
}

std::optional<int> next_signal(milliseconds time) {
  const sigset_t set = signals_to_drain();
  const timespec timeout{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
  const int number = ::sigtimedwait(&set, nullptr, &timeout);
  return number > 0 ? std::optional(number) : std::nullopt;
}

// The server, and how people hear of it. Confined to the main thread.
class ServerProcess {
 public:
  explicit ServerProcess(const ServerOrders& orders) : orders_(orders), log_("penstock worker") {}

  int run() {
    const DescriptorLimit limit = raise_descriptor_limit();
    auto read = options_at(orders_.addresses);
    if (!read) return refuse(read.error());
    const net::RunId run = net::draw_run_id(read.value().keys.own().public_key());
    log_.set_name("penstock worker " + spoken_id(run.id).substr(0, 8));
    auto warm = WarmProcess::start(orders_.warm_command);
    if (!warm) return refuse(warm.error());
    const auto facts = wait_for(*warm.value());
    if (!facts) return is_told_to_end_ ? 0 : refuse(facts.error());
    PoolServerOptions options = std::move(read).value();
    options.about = facts.value().about;
    options.numerics = facts.value().numerics;
    options.torch = facts.value().torch;
    options.name = orders_.name;
    options.arena_bytes = orders_.arena_bytes;
    options.blob_bytes_max = orders_.blob_bytes_max;
    options.patience = duration_of(orders_.patience_s);
    options.drain_grace = duration_of(orders_.grace_s);
    options.parent_pid = orders_.parent_pid;
    options.powercap = orders_.powercap;
    options.exit_fd = orders_.exit_fd;
    JobHost jobs(*warm.value(), "penstock worker " + spoken_id(run.id).substr(0, 8));
    PoolServerIo io(options, run, jobs, nullptr);
    EventLoop loop("pk_pool_server", "which speaks with trainers", io);
    jobs.set_waker(loop.waker());
    if (auto started = loop.start(); !started) return refuse(started.error());
    write_exit_line(options.exit_fd, ExitWord::kServing);
    say("listens at " + where(io.endpoint().text(), io.advertised()) + " and for batches at " +
        where(io.data_endpoint().text(), io.data_advertised()) + " for " +
        orders_.addresses.controller.value_or("whoever has its key") + ", id " + spoken_id(run.id) + ", process " +
        std::to_string(::getpid()));
    for (const std::string& line : spoken(limit)) say(line);
    return serve(jobs, io);
  }

 private:
  static std::string where(const std::string& bound, const std::string& advertised) {
    return bound == advertised ? bound : bound + " (which trainers reach at " + advertised + ")";
  }

  // A fault of what it was told is the same for the next process; a shortage may be over by then.
  int refuse(const Fault& why) {
    log_.tell(why.message);
    const bool may_pass = why.code == Errc::kNoMemory || why.code == Errc::kClosed || why.code == Errc::kTimeout;
    if (!may_pass) write_exit_line(orders_.exit_fd, ExitWord::kUseless);
    return EXIT_FAILURE;
  }

  Result<WarmFacts> wait_for(WarmProcess& warm) {
    const WatchedProcess parent(orders_.parent_pid);
    for (const auto deadline = steady_clock::now() + kWarmMax; !parent.is_gone();) {
      auto facts = warm.wait_until_ready(steady_clock::now() + kLook);
      if (facts || facts.error().code != Errc::kTimeout || steady_clock::now() >= deadline) return facts;
      if (!next_signal(milliseconds(0))) continue;
      write_exit_line(orders_.exit_fd, ExitWord::kDrained);
      is_told_to_end_ = true;
      return Fault{Errc::kClosed, "it was told to leave"};
    }
    is_told_to_end_ = true;
    return Fault{Errc::kClosed, "the process that started this worker is gone"};
  }

  int serve(JobHost& jobs, const PoolServerIo& io) {
    // It drains whatever this thread waits for.
    const std::jthread signals([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        const auto number = next_signal(kLook);
        const auto byte = static_cast<char>(number.value_or(0));
        if (number) static_cast<void>(::write(io.signal_fd(), &byte, 1) < 0);
      }
    });
    for (;;) {
      const auto reason = jobs.wait_closed(steady_clock::now() + kLook);
      write_output(jobs.take_output());
      for (const std::string& notice : jobs.take_notices()) log_.tell(notice);
      note_standing(jobs.standing());
      if (!reason) continue;
      if (reason->code == Errc::kClosed) {
        say("ends: " + reason->message);
        return 0;
      }
      log_.tell(reason->message);
      return EXIT_FAILURE;
    }
  }

  // As the job has written it.
  static void write_output(std::string_view text) {
    while (!text.empty()) {
      const ssize_t count = ::write(STDERR_FILENO, text.data(), text.size());
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;
      text.remove_prefix(static_cast<size_t>(count));
    }
  }

  void note_standing(const Standing& standing) {
    if (standing.drain_cause == Standing::DrainCause::kNone || std::exchange(is_draining_, true)) return;
    const std::string batches = standing.left_count == 1 ? "1 batch" : std::to_string(standing.left_count) + " batches";
    say("draining after " + std::string(name_of(standing.drain_cause)) + "; " + batches + " left");
  }

  void say(const std::string& text) {
    if (!orders_.is_quiet) log_.say(text);
  }

  const ServerOrders& orders_;
  ProcessLog log_;
  bool is_told_to_end_ = false;
  bool is_draining_ = false;
};

}  // namespace

Result<ServerOrders> parse_server_orders(std::span<const char* const> arguments) {
  ServerOrders orders;
  const auto bad = [](std::string_view argument) {
    return Fault{Errc::kMalformed, "penstock-server is started by `penstock worker`; it does not understand \"" +
                                       std::string(argument) + "\""};
  };
  for (size_t index = 0; index < arguments.size(); ++index) {
    const std::string_view argument = arguments[index];
    if (argument == "--") {
      orders.warm_command.assign(arguments.begin() + static_cast<ptrdiff_t>(index) + 1, arguments.end());
      break;
    }
    const size_t equals = argument.find('=');
    if (!argument.starts_with("--") || equals == std::string_view::npos) return bad(argument);
    const std::string_view option = argument.substr(2, equals - 2);
    const std::string value(argument.substr(equals + 1));
    ServerAddresses& addresses = orders.addresses;
    bool is_read = true;
    if (option == "bind") {
      addresses.bind = value;
    } else if (option == "controller") {
      addresses.controller = value;
    } else if (option == "advertised") {
      addresses.advertised = value;
    } else if (option == "data-bind") {
      addresses.data_bind = value;
    } else if (option == "data-advertised") {
      addresses.data_advertised = value;
    } else if (option == "keys") {
      addresses.key_folder = value;
    } else if (option == "name") {
      orders.name = value;
    } else if (option == "powercap") {
      orders.powercap = value;
    } else if (option == "arena-bytes") {
      is_read = read_number(value, orders.arena_bytes);
    } else if (option == "blob-bytes") {
      is_read = read_number(value, orders.blob_bytes_max);
    } else if (option == "patience") {
      is_read = read_number(value, orders.patience_s);
    } else if (option == "grace") {
      is_read = read_number(value, orders.grace_s);
    } else if (option == "parent") {
      is_read = read_number(value, orders.parent_pid);
    } else if (option == "exit-fd") {
      is_read = read_number(value, orders.exit_fd);
    } else if (option == "quiet") {
      orders.is_quiet = value == "1";
      is_read = value == "0" || value == "1";
    } else {
      return bad(argument);
    }
    if (!is_read) return bad(argument);
  }
  if (orders.addresses.bind.empty() || orders.warm_command.empty())
    return Fault{Errc::kMalformed,
                 "penstock-server is started by `penstock worker`, with --bind=... and, behind --, the command of the "
                 "process that it forks those of jobs from"};
  return orders;
}

int server_program(int argument_count, const char* const* arguments) {
  const auto orders = parse_server_orders({arguments + 1, static_cast<size_t>(std::max(argument_count, 1) - 1)});
  if (!orders) {
    std::cerr << orders.error().message << "\n";
    return kUsageExitCode;
  }
  // Its memory, with the keys, is for nobody of its user to read, and for no dump.
  ::prctl(PR_SET_DUMPABLE, 0);
  if (orders.value().exit_fd >= 0) ::fcntl(orders.value().exit_fd, F_SETFD, FD_CLOEXEC);
  // For this thread and all that it starts: who waits for them takes them.
  const sigset_t set = signals_to_drain();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // NOLINT(concurrency-mt-unsafe): there is no other thread yet
  ::signal(SIGCHLD, SIG_DFL);  // NOLINT(concurrency-mt-unsafe): whoever started it may have ignored it
  return ServerProcess(orders.value()).run();
}

}  // namespace penstock::server
