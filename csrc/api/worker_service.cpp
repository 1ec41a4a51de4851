// SPDX-License-Identifier: Apache-2.0
#include "api/worker_service.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <link.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

#include "api/native_job.h"
#include "api/surroundings.h"
#include "base/child_process.h"
#include "base/job_separation.h"
#include "base/process.h"
#include "penstock/error.h"
#include "wire/reports.h"
#include "worker/job_channel.h"
#include "worker/process_memory.h"
#include "worker/warm_channel.h"

namespace penstock::api {

using server::PoolWork;
using std::chrono::steady_clock;
using worker::BatchServer;

namespace {

constexpr auto kNoticeInterval = std::chrono::milliseconds(500);
constexpr auto kBlobWait = std::chrono::seconds(60);
constexpr size_t kJobCountMax = 2;  // for two loaders that a trainer uses in turn

std::string short_id(uint64_t id) { return format_id(id).substr(0, 8); }

// A worker's jobs and prefixes, which it fetches from its trainer as blobs, and its log lines about changes.
class Service {
 public:
  Service(BatchServer& server, const WorkerLog& speech) : server_(server), worker_log_(speech) {}

  Result<void> run() {
    for (;;) {
      auto work = server_.next(steady_clock::now() + kNoticeInterval);
      for (const std::string& notice : server_.take_notices()) worker_log_.tell(notice);
      if (!work && work.error().code == Errc::kTimeout) continue;
      auto done = work ? answer(*work.value()) : Result<void>(work.error());
      if (done) continue;
      finish_service();
      for (const std::string& notice : server_.take_notices()) worker_log_.tell(notice);
      return done.error().code == Errc::kClosed ? Result<void>() : done;
    }
  }

 private:
  // A job of one trainer: its dataset may have changed since it was opened, and only that trainer's program may see the
  // changes.
  struct OpenJob {
    uint64_t trainer_id;
    wire::BlobId id;
    std::unique_ptr<NativeJob> job;
  };
  using Jobs = std::list<OpenJob>;  // most recently used first

  Result<void> answer(const PoolWork& work) {
    auto job = job_of(work);
    if (!job) return refuse(work, job.error());
    if (auto fetched = fetch_prefixes(work); !fetched) return refuse(work, fetched.error());
    note_batch(work.trainer_id, job.value()->name());
    return job.value()->answer(server_, work);
  }

  // A trainer that lacks a part has abandoned the request; a job that cannot run here is declined.
  Result<void> refuse(const PoolWork& work, const Fault& why) {
    if (why.code == Errc::kClosed) {
      server_.give_up();
      return {};
    }
    finish_service();
    worker_log_.say("refuses trainer " + short_id(work.trainer_id) + ": " + why.message);
    server_.decline(why.message);
    return {};
  }

  Result<NativeJob*> job_of(const PoolWork& work) {
    if (work.blobs.empty()) {
      return Fault{Errc::kUnsupported,
                   "a batch was requested without its job; install the same version of penstock on both"};
    }
    const wire::BlobId& id = work.blobs[0];
    for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
      if (job->trainer_id != work.trainer_id || job->id != id) continue;
      jobs_.splice(jobs_.begin(), jobs_, job);
      return job->job.get();
    }
    while (jobs_.size() >= kJobCountMax) jobs_.pop_back();  // first: there may be no memory for one more
    const auto blob = fetch(id);
    if (!blob) return blob.error();
    auto opened = NativeJob::open(blob.value(), [this](const wire::BlobId& part) { return fetch(part); });
    if (!opened) return opened.error();
    jobs_.push_front({work.trainer_id, id, std::move(opened).value()});
    return jobs_.front().job.get();
  }

  Result<void> fetch_prefixes(const PoolWork& work) {
    for (const wire::BlobId& id : work.prefixes()) {
      if (server_.prefixes().has(id)) continue;
      const auto message = fetch(id);
      // A prefix that the trainer no longer has counts as empty: the trainer runs it itself.
      if (!message && message.error().code != Errc::kUnsupported) return message.error();
      server_.prefixes().put(id, message ? std::span<const std::byte>(message.value()) : std::span<const std::byte>());
    }
    return {};
  }

  Result<std::vector<std::byte>> fetch(const wire::BlobId& id) {
    for (;;) {
      auto blob = server_.blob(id, steady_clock::now() + kBlobWait);
      if (!blob && blob.error().code == Errc::kTimeout) continue;
      if (!blob || blob_id_of(blob.value()) == id) return blob;
      return Fault{Errc::kMalformed,
                   "the trainer sent another part of a job than it announced; trainer and workers must run the same "
                   "version of penstock"};
    }
  }

  // ---- The log

  void note_batch(uint64_t trainer_id, const std::string& job) {
    if (trainer_id != trainer_id_ || job != job_name_) {
      finish_service();
      trainer_id_ = trainer_id;
      job_name_ = job;
      worker_log_.say("serves " + job + " of trainer " + short_id(trainer_id));
    }
    ++batch_count_;
  }

  void finish_service() {
    if (trainer_id_ == 0) return;
    worker_log_.say("has finished " + job_name_ + " of trainer " + short_id(trainer_id_) + ": " +
                    std::to_string(batch_count_) + (batch_count_ == 1 ? " batch" : " batches"));
    trainer_id_ = 0;
    batch_count_ = 0;
  }

  BatchServer& server_;
  const WorkerLog& worker_log_;
  Jobs jobs_;
  uint64_t trainer_id_ = 0;
  std::string job_name_;
  uint64_t batch_count_ = 0;
};

}  // namespace

Result<void> serve_jobs(BatchServer& server, const WorkerLog& speech) { return Service(server, speech).run(); }

namespace {

using worker::WarmChannel;

// Only the server ends this process and the job processes, whoever else sends a signal, and a plug-in's write to a
// closed socket is an error of that write. The signals are handled rather than ignored: programs that a plug-in starts
// would inherit ignored signals.
void disarm_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGTERM, SIGINT, SIGPIPE}) ::sigaction(number, &action, nullptr);
}

// ---- In a job process

// Isolates a process that was just forked from `warm_pid` from other job processes.
void part_from(pid_t warm_pid, const JobSeparation& separation) {
  ::setsid();  // so that all processes that a plug-in starts can be ended with this one
  // If the warm process is killed, its channel signals this to the server only.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != warm_pid) ::_exit(EXIT_FAILURE);  // it has ended meanwhile, and so has the server
  if (const auto separated = separate_job(separation); !separated) {
    std::cerr << separated.error().message << std::endl;
    ::_exit(EXIT_FAILURE);
  }
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::lock_guard lock(generator.mutex());
  generator.seed();
}

// Serves until the job is over. The server ignores the exit code; it is for readers of its log.
int serve_job(FileDescriptor channel, const ProcessLog& log) {
  try {
    const auto bytes = arena_bytes();
    if (!bytes) {
      log.tell(bytes.error().message);
      return EXIT_FAILURE;
    }
    worker::JobServer server(std::move(channel), bytes.value());
    const auto served = serve_jobs(server, {.say = [&](const std::string& text) { log.say(text); },
                                            .tell = [&](const std::string& text) { log.tell(text); }});
    if (served) return EXIT_SUCCESS;
    log.tell(served.error().message);
  } catch (...) {
    log.tell("the process of a job ends after " + current_exception_name() + ": " + current_exception_text());
  }
  return EXIT_FAILURE;
}

// Also ends the process: exit handlers registered by a plug-in do not run, and its threads are not joined.
[[noreturn]] void run_job(WarmChannel& warm, WarmChannel::Order order, pid_t warm_pid,
                          const JobSeparation& separation) {
  // The server reads both, and reports the last output if the process ends.
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) ::dup2(order.errors.get(), stream);
  order.errors.reset();
  warm.close_in_child();
  part_from(warm_pid, separation);
  const int code = serve_job(std::move(order.channel), ProcessLog(order.log_name));
  std::cout.flush();
  std::fflush(stdout);
  ::_exit(code);
}

// ---- In the warm process

// The files from which this process, and thus each job process, has loaded its code.
std::vector<std::string> loaded_files() {
  std::vector<std::string> files;
  const auto add = [](dl_phdr_info* info, size_t, void* list) {
    // The name of the program itself is empty.
    const char* const name = *info->dlpi_name == '\0' ? "/proc/self/exe" : info->dlpi_name;
    std::array<char, PATH_MAX> real{};
    if (::realpath(name, real.data()) != nullptr)
      static_cast<std::vector<std::string>*>(list)->emplace_back(real.data());
    return 0;
  };
  ::dl_iterate_phdr(add, &files);
  return files;
}

// Chooses how to hide the key folder from jobs here; logs the choice and anything that is not isolated.
JobSeparation hiding(const std::string& key_folder, const ProcessLog& log) {
  if (key_folder.empty()) return {};
  JobSeparation separation{.hidden = {key_folder}};
  const KeyHiding chosen = choose_key_hiding({.folder = key_folder, .needed = loaded_files()},
                                             [&](JobSeparation::Hiding hiding) -> std::string {
                                               separation.hiding = hiding;
                                               const auto tried = try_separation(separation);
                                               return tried ? "" : tried.error().message;
                                             });
  if (!chosen.notice.empty()) log.say(chosen.notice);
  if (!chosen.trouble.empty()) log.tell("jobs are not kept from the keys: " + chosen.trouble);
  if (chosen.hiding == JobSeparation::Hiding::kNone) return {};
  separation.hiding = chosen.hiding;
  return separation;
}

// The warm process: forks job processes on the server's orders.
class WarmWorker {
 public:
  WarmWorker(FileDescriptor channel, const std::string& key_folder)
      : separation_(hiding(key_folder, log_)), channel_(std::move(channel)) {}

  int run() {
    auto done = channel_.ready(wire::kind_bit(wire::JobKind::kPlugin), about_worker(::getppid()));
    note_threads();
    while (done) {
      auto news = channel_.next();
      if (!news) {
        done = news.error();
      } else if (auto* order = std::get_if<WarmChannel::Order>(&news.value())) {
        done = fork(std::move(*order));
      }
    }
    if (done.error().code == Errc::kClosed) return EXIT_SUCCESS;
    log_.tell(done.error().message);
    return EXIT_FAILURE;
  }

 private:
  // A forked process has only the thread that called fork(), and locks stay as the other threads held them.
  void note_threads() const {
    if (const size_t count = own_threads().size(); count > 1)
      log_.tell("the process that forks job processes must have one thread, got " + std::to_string(count) +
                ", so a job may deadlock on a lock of another thread; start it without LD_PRELOAD and other libraries "
                "that start threads");
  }

  Result<void> fork(WarmChannel::Order order) {
    const pid_t pid = ::fork();
    if (pid == 0) run_job(channel_, std::move(order), pid_, separation_);
    if (pid < 0)
      ProcessLog(order.log_name)
          .tell(std::string("a job process could not be started (") + std::strerror(errno) +
                "); free memory, or raise the limit of processes");
    return channel_.started(order.job, std::max(pid, 0));
  }

  const pid_t pid_ = ::getpid();
  const ProcessLog log_{"penstock-worker"};
  const JobSeparation separation_;  // of each job
  WarmChannel channel_;
};

}  // namespace

std::string about_worker(int pid) {
  const TorchVersion torch;
  return host_name() + ", process " + std::to_string(pid) + ", penstock " + PENSTOCK_VERSION + " (plug-ins), torch " +
         std::to_string(torch.major) + "." + std::to_string(torch.minor);
}

int run_warm_worker(FileDescriptor channel, const std::string& key_folder) {
  disarm_signals();
  worker::tune_malloc();
  static_cast<void>(raise_descriptor_limit());
  at::set_num_threads(1);  // before the first kernel, which would start a thread pool
  return WarmWorker(std::move(channel), key_folder).run();
}

}  // namespace penstock::api
