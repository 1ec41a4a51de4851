// SPDX-License-Identifier: Apache-2.0
#pragma once
// The process from which a server forks job processes (WarmProcess). The workers of the server share it (WarmHub), each
// through its WarmSeat.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/child_process.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/numerics.h"
#include "base/result.h"
#include "shm/channel.h"
#include "wire/job_record.h"

namespace penstock::server {

// The facts that a warm process reports once it can fork.
struct WarmFacts {
  Numerics numerics{};  // of its kernels
  uint16_t torch = 0;   // as wire::torch_number()
  uint8_t job_kinds{};  // that its processes can run
  std::string about{};  // human-readable
};

// The process from which a server forks job processes: it has imported the modules that every job needs, and runs no
// user code. It is the parent of the job processes, so only it can report how one ended, regardless of the actions of
// the dataset. Confined to one thread at a time.
class WarmProcess {
 public:
  // Starts the process. `command` gets one more argument: the number of the channel's descriptor.
  static Result<std::unique_ptr<WarmProcess>> start(std::vector<std::string> command);

  WarmProcess(ChildProcess process, shm::Channel channel);
  WarmProcess(const WarmProcess&) = delete;
  WarmProcess& operator=(const WarmProcess&) = delete;
  // Makes it end the processes of its jobs and then itself, and kills it if it does not.
  ~WarmProcess();

  pid_t pid() const { return process_.pid(); }
  // Readable when it has sent a message, or has ended.
  int fd() const { return channel_.fd(); }

  // Waits until it is ready. kTimeout at the deadline, kClosed with how it ended. Blocks.
  Result<WarmFacts> wait_until_ready(std::chrono::steady_clock::time_point deadline);

  // Makes it fork a process for the job, which gets `channel`, and `errors` to write its output to. The outcome is
  // reported as news.
  Result<void> fork(uint64_t job, int channel, int errors, const std::string& log_name);
  // Makes it end the process of the job immediately, with all processes in its session.
  Result<void> end(uint64_t job);

  // The next news, kStarted or kEnded; empty if there is none. kClosed with how it ended once it has.
  struct News {
    wire::WarmMessage::Kind kind{};
    uint64_t job = 0;
    pid_t pid = 0;
    int status = 0;
  };
  Result<std::optional<News>> next_news();

 private:
  Fault ended();
  Result<void> send(const wire::WarmMessage& message, std::span<const int> fds = {});

  ChildProcess process_;
  shm::Channel channel_;
};

// The warm process of a server, shared by its workers: the I/O thread of each has a seat, through which it forks job
// processes and receives news of them. Jobs have numbers that are unique among all seats.
//
// The thread that finds messages from the warm process reads all of them, and wakes the threads that they concern. The
// end of the warm process concerns all threads.
//
// Thread-safe.
class WarmHub {
 public:
  // `warm` must be ready.
  explicit WarmHub(std::unique_ptr<WarmProcess> warm) : fd_(warm->fd()), warm_(std::move(warm)) {}
  WarmHub(const WarmHub&) = delete;
  WarmHub& operator=(const WarmHub&) = delete;

 private:
  friend class WarmSeat;
  struct Seat {
    std::atomic<bool>& has_news;  // the WarmSeat's
    Waker* waker = nullptr;
    std::deque<WarmProcess::News> news{};  // at most two for each of its jobs
    std::set<uint64_t> jobs{};             // their ends have not been reported yet
  };

  static void note_news(Seat& seat);
  // Reads all messages of the warm process. `reader` needs no wake for its own messages.
  void read_news(const Seat& reader) PENSTOCK_REQUIRES(mutex_);

  const int fd_;
  Mutex mutex_;
  const std::unique_ptr<WarmProcess> warm_ PENSTOCK_GUARDED_BY(mutex_);
  std::set<Seat*> seats_ PENSTOCK_GUARDED_BY(mutex_);
  std::map<uint64_t, Seat*> owners_ PENSTOCK_GUARDED_BY(mutex_);  // of the seats' jobs, by number
  uint64_t next_job_ PENSTOCK_GUARDED_BY(mutex_) = 1;
  std::optional<Fault> failure_ PENSTOCK_GUARDED_BY(mutex_);
};

// One worker's access to the hub, which must outlive the seat. Thread-safe.
class WarmSeat {
 public:
  explicit WarmSeat(WarmHub& hub);
  WarmSeat(const WarmSeat&) = delete;
  WarmSeat& operator=(const WarmSeat&) = delete;
  ~WarmSeat();

  // The waker of the thread that reads the news. It must outlive the seat, or stay valid until close().
  void set_waker(Waker& waker);
  // Readable when the warm process has sent a message, or has ended.
  int fd() const { return hub_.fd_; }

  // Forks a process for a job and returns the job's number; otherwise as WarmProcess::fork(). kClosed after close().
  Result<uint64_t> fork(int channel, int errors, const std::string& log_name);
  // As WarmProcess::end().
  Result<void> end(uint64_t job);
  // Whether another thread has found news for this seat; fd() is no longer readable then.
  bool has_news() const { return has_news_; }
  // The next news of this seat's jobs. After all news: kFailed once the warm process has ended or violated the
  // protocol, with how it ended or with the violation.
  Result<std::optional<WarmProcess::News>> next_news();
  // Ends the processes of its jobs immediately. Afterwards the seat receives no news and wakes no thread.
  void close();

 private:
  WarmHub& hub_;
  std::atomic<bool> has_news_ = false;
  WarmHub::Seat seat_ PENSTOCK_GUARDED_BY(hub_.mutex_){.has_news = has_news_};
};

}  // namespace penstock::server
