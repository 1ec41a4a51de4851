// SPDX-License-Identifier: Apache-2.0
#pragma once
// The warm process of a server, shared by its workers: the I/O thread of each has a seat there, through which it has
// processes of jobs forked and hears what becomes of its own. Jobs have numbers that are unique among all seats.
//
// Whichever thread finds that the warm process has said something reads all of it, and wakes the threads that it
// concerns. The end of the warm process concerns all.

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/result.h"
#include "base/waker.h"
#include "server/warm_process.h"

namespace penstock::server {

// Thread-safe.
class WarmHub {
 public:
  // `warm` is ready.
  explicit WarmHub(std::unique_ptr<WarmProcess> warm) : fd_(warm->fd()), warm_(std::move(warm)) {}
  WarmHub(const WarmHub&) = delete;
  WarmHub& operator=(const WarmHub&) = delete;

 private:
  friend class WarmSeat;
  struct Seat {
    std::atomic<bool>& has_news;  // the WarmSeat's
    Waker* waker = nullptr;
    std::deque<WarmProcess::News> news{};  // two for each of its jobs at most
    std::set<uint64_t> jobs{};             // whose end was not told yet
  };

  static void note_news(Seat& seat);
  // Reads all that the warm process has said. `reader` needs no wake for its own.
  void read_news(const Seat& reader) PENSTOCK_REQUIRES(mutex_);

  const int fd_;
  Mutex mutex_;
  const std::unique_ptr<WarmProcess> warm_ PENSTOCK_GUARDED_BY(mutex_);
  std::set<Seat*> seats_ PENSTOCK_GUARDED_BY(mutex_);
  std::map<uint64_t, Seat*> owners_ PENSTOCK_GUARDED_BY(mutex_);  // of the seats' jobs, by number
  uint64_t next_job_ PENSTOCK_GUARDED_BY(mutex_) = 1;
  std::optional<Fault> failure_ PENSTOCK_GUARDED_BY(mutex_);
};

// What one worker has of the hub, which outlives it. Thread-safe.
class WarmSeat {
 public:
  explicit WarmSeat(WarmHub& hub);
  WarmSeat(const WarmSeat&) = delete;
  WarmSeat& operator=(const WarmSeat&) = delete;
  ~WarmSeat();

  // Of the thread that asks for news. Outlives the seat, or what comes before close().
  void set_waker(Waker& waker);
  // Readable when the warm process has said something, or has ended.
  int fd() const { return hub_.fd_; }

  // Has a process forked for a job, whose number it returns; the rest as WarmProcess::fork(). kClosed after close().
  Result<uint64_t> fork(int channel, int errors, const std::string& log_name);
  // As WarmProcess::end().
  Result<void> end(uint64_t job);
  // Whether another thread has found news of it, where fd() is no longer readable.
  bool has_news() const { return has_news_; }
  // The next news of this seat's jobs. kFailed with how the warm process ended once it has, or with what it has said
  // wrongly, behind all news.
  Result<std::optional<WarmProcess::News>> next_news();
  // Ends the processes of its jobs at once. It hears nothing more, and wakes nobody.
  void close();

 private:
  WarmHub& hub_;
  std::atomic<bool> has_news_ = false;
  WarmHub::Seat seat_ PENSTOCK_GUARDED_BY(hub_.mutex_){.has_news = has_news_};
};

}  // namespace penstock::server
