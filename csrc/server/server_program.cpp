// SPDX-License-Identifier: Apache-2.0
#include "server/server_program.h"

#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/child_process.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/mutex.h"
#include "base/process.h"
#include "net/key_folder.h"
#include "net/keys.h"
#include "server/host_load.h"
#include "server/job_host.h"
#include "server/machine_store.h"
#include "server/pool_server_io.h"
#include "server/warm_process.h"
#include "server/watched_process.h"
#include "wire/job_record.h"

namespace penstock::server {
namespace {

Result<std::optional<net::Endpoint>> parse(const std::optional<std::string>& text) {
  if (!text) return std::optional<net::Endpoint>();
  auto endpoint = net::Endpoint::parse(*text);
  if (!endpoint) return endpoint.error();
  return std::optional(std::move(endpoint).value());
}

}  // namespace

Result<PoolServerOptions> options_at(const ServerAddresses& addresses) {
  auto bind = net::Endpoint::parse(addresses.bind);
  if (!bind) return bind.error();
  auto controller = parse(addresses.controller);
  if (!controller) return controller.error();
  auto advertised = parse(addresses.advertised);
  if (!advertised) return advertised.error();
  auto data_bind = parse(addresses.data_bind);
  if (!data_bind) return data_bind.error();
  auto data_advertised = parse(addresses.data_advertised);
  if (!data_advertised) return data_advertised.error();
  auto keys = net::load_keys(addresses.key_folder, net::Role::kWorker);
  if (!keys) return keys.error();
  return PoolServerOptions{.bind = std::move(bind).value(),
                           .keys = std::move(keys).value(),
                           .controller = std::move(controller).value(),
                           .advertised = std::move(advertised).value(),
                           .data_bind = std::move(data_bind).value(),
                           .data_advertised = std::move(data_advertised).value()};
}

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kUsageExitCode = 2;
constexpr milliseconds kLook{200};  // interval between checks of the notices and of the parent
// To import the modules that every job needs, from a slow disk and on a busy machine.
constexpr auto kWarmMax = std::chrono::minutes(10);
constexpr std::chrono::seconds kStraysMax{1};  // for processes left behind by job processes to end

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

struct Signal {
  int number;
  pid_t sender;
};

std::optional<Signal> next_signal(milliseconds time) {
  const sigset_t set = signals_to_drain();
  const timespec timeout{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
  siginfo_t found{};
  const int number = ::sigtimedwait(&set, &found, &timeout);
  return number > 0 ? std::optional<Signal>({.number = number, .sender = found.si_pid}) : std::nullopt;
}

// Unchanged, as written by the job.
void write_output(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(STDERR_FILENO, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    text.remove_prefix(static_cast<size_t>(count));
  }
}

// The warm process's description of the server, for one of its workers: the worker's number follows the process, to
// distinguish it from the other workers there.
std::string about_worker(std::string about, size_t place) {
  const std::string process = "process " + std::to_string(::getpid());
  const size_t found = about.find(process);
  if (found != std::string::npos) about.insert(found + process.size(), "-" + std::to_string(place + 1));
  about.resize(std::min(about.size(), wire::kAboutBytesMax));
  return about;
}

std::string log_name_of(const ServerOrders& orders, const net::RunId& run) {
  return orders.log_name + " " + format_id(run.id).substr(0, 8);
}

// Where the I/O threads of workers report to the main thread that they end. Thread-safe.
class WorkerEnds {
 public:
  struct End {
    ExitWord word{};
    std::string text;
  };

  // For the worker at `place`; the last word counts.
  void tell(size_t place, ExitWord word, std::string_view text) {
    MutexLock lock(mutex_);
    ends_[place] = {.word = word, .text = std::string(text)};
    has_news_ = true;
    changed_.notify_all();
  }
  // Waits for another worker to end. Blocks.
  void wait(steady_clock::time_point deadline) {
    MutexLock lock(mutex_);
    while (!has_news_) {
      if (!changed_.wait_until(mutex_, deadline)) return;
    }
    has_news_ = false;
  }
  // Empty for a worker that has not reported its end.
  std::optional<End> of(size_t place) const {
    MutexLock lock(mutex_);
    const auto end = ends_.find(place);
    return end != ends_.end() ? std::optional(end->second) : std::nullopt;
  }

 private:
  mutable Mutex mutex_;
  Condition changed_;
  std::map<size_t, End> ends_ PENSTOCK_GUARDED_BY(mutex_);
  bool has_news_ PENSTOCK_GUARDED_BY(mutex_) = false;
};

// One of the workers, and its log. Confined to the main thread, except for signal_fd().
class ServedWorker {
 public:
  ServedWorker(WarmHub& hub, const ServerOrders& orders, PoolServerOptions options, const net::RunId& run)
      : options_(with_log(std::move(options), tail_)),
        run_(run),
        log_name_(log_name_of(orders, run)),
        log_(log_name_),
        is_quiet_(orders.is_quiet),
        seat_(hub),
        jobs_(seat_, log_name_),
        io_(options_, run, jobs_, nullptr),
        loop_("pk_pool_server", "which communicates with trainers", io_) {
    jobs_.set_waker(loop_.waker());
  }
  ServedWorker(const ServedWorker&) = delete;
  ServedWorker& operator=(const ServedWorker&) = delete;
  // Other threads that have news for its seat must not wake a loop that is gone.
  ~ServedWorker() { seat_.close(); }

  Result<void> start() { return loop_.start(); }
  int signal_fd() const { return io_.signal_fd(); }

  void report_listening() const {
    say("listens at " + where(io_.endpoint().text(), io_.advertised()) + " and for batches at " +
        where(io_.data_endpoint().text(), io_.data_advertised()) + " for " +
        (options_.controller ? options_.controller->text() : "any client with its key") + ", id " + format_id(run_.id) +
        ", process " + std::to_string(::getpid()));
  }

  // Logs new notices. Returns why the worker has ended, if it has; waits for its end until the deadline.
  std::optional<Fault> look(steady_clock::time_point deadline) {
    auto reason = jobs_.wait_closed(deadline);
    const std::string output = jobs_.take_output();
    write_output(output);
    tail_->add_output(output, log_name_);
    for (const std::string& notice : jobs_.take_notices()) warn(notice);
    note_standing(jobs_.standing());
    return reason;
  }
  // The worker has ended, and its thread is no longer needed.
  void close(const Fault& reason) {
    loop_.stop();
    if (reason.code == Errc::kClosed) {
      say("ends: " + reason.message);
    } else {
      warn(reason.message);
    }
  }

  void say(const std::string& text) const {
    tail_->add(text);
    if (!is_quiet_) log_.say(text);
  }

 private:
  static PoolServerOptions with_log(PoolServerOptions options, std::shared_ptr<const LogTail> tail) {
    options.log = std::move(tail);
    return options;
  }

  void warn(const std::string& text) const {
    tail_->add(text);
    log_.tell(text);
  }

  static std::string where(const std::string& bound, const std::string& advertised) {
    return bound == advertised ? bound : bound + " (which trainers reach at " + advertised + ")";
  }

  void note_standing(const Standing& standing) {
    if (standing.drain_cause == Standing::DrainCause::kNone || std::exchange(is_draining_, true)) return;
    const std::string batches = standing.left_count == 1 ? "1 batch" : std::to_string(standing.left_count) + " batches";
    say("draining after " + std::string(name_of(standing.drain_cause)) + "; " + batches + " left");
  }

  const std::shared_ptr<LogTail> tail_ = std::make_shared<LogTail>();
  const PoolServerOptions options_;
  const net::RunId run_;
  const std::string log_name_;
  const ProcessLog log_;
  const bool is_quiet_;
  bool is_draining_ = false;
  WarmSeat seat_;
  JobHost jobs_;
  PoolServerIo io_;
  EventLoop loop_;
};

// The process with its workers. Confined to the main thread.
class ServerProcess {
 public:
  explicit ServerProcess(const ServerOrders& orders) : orders_(orders), log_(orders.log_name) {}

  int run() {
    const DescriptorLimit limit = raise_descriptor_limit();
    std::vector<PoolServerOptions> options;
    std::vector<net::RunId> runs;
    for (const ServerAddresses& addresses : orders_.workers) {
      auto read = options_at(addresses);
      if (!read) return refuse(read.error());
      options.push_back(std::move(read).value());
      runs.push_back(net::draw_run_id(options.back().keys.own().public_key()));
    }
    if (runs.size() == 1) log_.set_name(log_name_of(orders_, runs.front()));
    auto warm = WarmProcess::start(orders_.warm_command);
    if (!warm) return refuse(warm.error());
    const auto facts = wait_for(*warm.value());
    if (!facts) return is_stop_requested_ ? 0 : refuse(facts.error());
    WarmHub hub(std::move(warm).value());
    const auto store = std::make_shared<MachineStore>(store_place(options.front(), facts.value()));
    if (auto started = store->start(); !started) return refuse(started.error());
    Workers workers;
    for (size_t place = 0; place < options.size(); ++place) {
      set_up(options[place], facts.value(), place);
      options[place].store = store;
      workers.push_back(std::make_unique<ServedWorker>(hub, orders_, std::move(options[place]), runs[place]));
    }
    for (const auto& worker : workers) {
      if (auto started = worker->start(); !started) return refuse(started.error());
    }
    write_exit_line(orders_.exit_fd, ExitWord::kServing);
    for (const auto& worker : workers) worker->report_listening();
    for (const std::string& line : format_limit(limit)) workers.front()->say(line);
    return serve(workers, *store);
  }

 private:
  using Workers = std::vector<std::unique_ptr<ServedWorker>>;

  // Invalid orders would fail in the next process, too; a shortage may be over by then.
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
      is_stop_requested_ = true;
      return Fault{Errc::kClosed, "it was drained"};
    }
    is_stop_requested_ = true;
    return Fault{Errc::kClosed, "the process that started this worker has ended"};
  }

  std::optional<StorePlace> store_place(const PoolServerOptions& options, const WarmFacts& facts) const {
    if (orders_.installation.empty() || !options.controller) return std::nullopt;
    const auto numerics = std::as_bytes(std::span(facts.numerics));
    const std::array<std::string, 3> parts = {
        orders_.installation, std::to_string(facts.torch),
        std::string(reinterpret_cast<const char*>(numerics.data()), numerics.size())};
    return StorePlace::of(options.keys, options.controller->text(), parts);
  }

  void set_up(PoolServerOptions& options, const WarmFacts& facts, size_t place) {
    options.about = orders_.workers.size() > 1 ? about_worker(facts.about, place) : facts.about;
    options.numerics = facts.numerics;
    options.torch = facts.torch;
    options.job_kinds = facts.job_kinds;
    options.name = orders_.name;
    options.arena_bytes = orders_.arena_bytes;
    options.blob_bytes_max = orders_.blob_bytes_max;
    options.patience = duration_of(orders_.patience_s);
    options.drain_grace = duration_of(orders_.grace_s);
    options.parent_pid = orders_.parent_pid;
    options.powercap = orders_.powercap;
    options.supervisor = [this, place](ExitWord word, std::string_view text) { ends_.tell(place, word, text); };
    options.ends_process = false;
    options.sharer_count = orders_.workers.size();
  }

  int serve(const Workers& workers, const MachineStore& store) {
    // Signals drain the workers regardless of what the main thread waits for.
    const std::jthread signals([&](const std::stop_token& stop) {
      std::vector<pid_t> senders;
      while (!stop.stop_requested()) {
        const auto signal = next_signal(kLook);
        if (!signal) continue;
        // Slurm and systemd signal all processes of a job, and the parent passes its signal on: that is not a second
        // one.
        if (std::ranges::find(senders, signal->sender) != senders.end()) ::_exit(128 + signal->number);
        senders.push_back(signal->sender);
        if (has_signal_.exchange(true)) continue;
        const auto byte = static_cast<char>(signal->number);
        for (const auto& worker : workers) static_cast<void>(::write(worker->signal_fd(), &byte, 1) < 0);
      }
    });
    std::vector<std::optional<WorkerEnds::End>> ends(workers.size());
    int exit_code = 0;
    for (size_t open_count = workers.size(); open_count > 0;) {
      ends_.wait(steady_clock::now() + kLook);
      report_store(store);
      for (size_t place = 0; place < workers.size(); ++place) {
        if (ends[place]) continue;
        // A worker that has reported its end closes shortly, and a closed worker has reported its word, if it has one.
        const auto now = steady_clock::now();
        const auto reason = workers[place]->look(ends_.of(place) ? now + kLook : now);
        if (!reason) continue;
        ends[place] = ends_.of(place).value_or(WorkerEnds::End{.word = ExitWord::kFailed, .text = reason->message});
        const bool has_failed = ends[place]->word == ExitWord::kFailed;
        // Before the worker's log shows that it has left.
        if (--open_count > 0 && !has_failed) write_exit_line(orders_.exit_fd, ExitWord::kLeft, std::to_string(place));
        workers[place]->close(*reason);
        if (reason->code != Errc::kClosed) exit_code = EXIT_FAILURE;
        if (has_failed && !has_signal_) return end(ends, exit_code);
      }
    }
    return end(ends, exit_code);
  }

  void report_store(const MachineStore& store) {
    if (is_store_reported_) return;
    const auto health = store.health();
    if (health) return;
    is_store_reported_ = true;
    log_.tell("kept batches are no longer shared with other workers of this machine: " + health.error().message);
  }

  // Reports the worst of the words to the supervisor.
  int end(std::span<const std::optional<WorkerEnds::End>> ends, int exit_code) const {
    for (const ExitWord word : {ExitWord::kFailed, ExitWord::kUseless, ExitWord::kDrained}) {
      for (const auto& end : ends) {
        if (!end || end->word != word) continue;
        write_exit_line(orders_.exit_fd, word, end->text);
        return exit_code;
      }
    }
    return exit_code;
  }

  const ServerOrders& orders_;
  ProcessLog log_;
  WorkerEnds ends_;
  std::atomic<bool> has_signal_{false};
  bool is_stop_requested_ = false;
  bool is_store_reported_ = false;
};

}  // namespace

Result<ServerOrders> parse_server_orders(std::span<const char* const> arguments) {
  ServerOrders orders;
  std::optional<std::string> controller;
  std::optional<std::string> key_folder;
  const auto bad = [](std::string_view argument) {
    return Fault{Errc::kMalformed,
                 "penstock-server is started by `penstock worker`; unknown option \"" + std::string(argument) + "\""};
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
    const bool is_of_one = option == "advertised" || option == "data-bind" || option == "data-advertised";
    if (is_of_one && orders.workers.empty()) return bad(argument);
    bool is_read = true;
    if (option == "bind") {
      orders.workers.push_back({.bind = value});
      is_read = !value.empty();
    } else if (option == "advertised") {
      orders.workers.back().advertised = value;
    } else if (option == "data-bind") {
      orders.workers.back().data_bind = value;
    } else if (option == "data-advertised") {
      orders.workers.back().data_advertised = value;
    } else if (option == "controller") {
      controller = value;
    } else if (option == "keys") {
      key_folder = value;
    } else if (option == "name") {
      orders.name = value;
    } else if (option == "installation") {
      orders.installation = value;
    } else if (option == "log-name") {
      orders.log_name = value;
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
  for (ServerAddresses& addresses : orders.workers) {
    addresses.controller = controller;
    addresses.key_folder = key_folder;
  }
  if (orders.workers.empty() || orders.warm_command.empty())
    return Fault{Errc::kMalformed,
                 "penstock-server is started by `penstock worker`, with --bind=... and, after --, the command of the "
                 "process that forks job processes"};
  return orders;
}

int server_program(int argument_count, const char* const* arguments) {
  const auto orders = parse_server_orders({arguments + 1, static_cast<size_t>(std::max(argument_count, 1) - 1)});
  if (!orders) {
    std::cerr << orders.error().message << "\n";
    return kUsageExitCode;
  }
  // Otherwise each of many threads would have an arena of 64 MiB of address space.
  ::mallopt(M_ARENA_MAX, 2);
  close_memory();  // it contains the keys
  if (orders.value().exit_fd >= 0) ::fcntl(orders.value().exit_fd, F_SETFD, FD_CLOEXEC);
  // For this thread and all threads that it starts: the thread that waits for the signals receives them.
  const sigset_t set = signals_to_drain();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // NOLINT(concurrency-mt-unsafe): there is no other thread yet
  ::signal(SIGCHLD, SIG_DFL);  // NOLINT(concurrency-mt-unsafe): the parent process may have ignored it
  // Ends processes left behind by a killed warm process.
  StrayProcesses strays;
  const int code = ServerProcess(orders.value()).run();
  static_cast<void>(strays.end_all_but({}, steady_clock::now() + kStraysMax));
  return code;
}

}  // namespace penstock::server
