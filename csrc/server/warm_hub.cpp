// SPDX-License-Identifier: Apache-2.0
#include "server/warm_hub.h"

#include <utility>

namespace penstock::server {

void WarmHub::note_news(Seat& seat) {
  seat.has_news = true;
  if (seat.waker != nullptr) seat.waker->wake();
}

void WarmHub::read_news(const Seat& reader) {
  while (!failure_) {
    const auto news = warm_->next_news();
    if (!news) {
      failure_ = Fault{Errc::kFailed, news.error().message};
      for (Seat* const seat : seats_)
        if (seat != &reader) note_news(*seat);
      return;
    }
    if (!news.value()) return;
    const WarmProcess::News& told = *news.value();
    const auto owner = owners_.find(told.job);
    if (owner == owners_.end()) continue;  // of a closed seat
    Seat& seat = *owner->second;
    seat.news.push_back(told);
    if (told.kind == wire::WarmMessage::Kind::kEnded) {
      seat.jobs.erase(told.job);
      owners_.erase(owner);
    }
    if (&seat != &reader) note_news(seat);
  }
}

WarmSeat::WarmSeat(WarmHub& hub) : hub_(hub) {
  MutexLock lock(hub_.mutex_);
  hub_.seats_.insert(&seat_);
}

WarmSeat::~WarmSeat() { close(); }

void WarmSeat::set_waker(Waker& waker) {
  MutexLock lock(hub_.mutex_);
  seat_.waker = &waker;
}

Result<uint64_t> WarmSeat::fork(int channel, int errors, const std::string& log_name) {
  MutexLock lock(hub_.mutex_);
  if (!hub_.seats_.contains(&seat_)) return Fault{Errc::kClosed, "this worker has ended"};
  const uint64_t job = hub_.next_job_++;
  if (auto forked = hub_.warm_->fork(job, channel, errors, log_name); !forked) return forked.error();
  hub_.owners_.emplace(job, &seat_);
  seat_.jobs.insert(job);
  return job;
}

Result<void> WarmSeat::end(uint64_t job) {
  MutexLock lock(hub_.mutex_);
  return hub_.warm_->end(job);
}

Result<std::optional<WarmProcess::News>> WarmSeat::next_news() {
  MutexLock lock(hub_.mutex_);
  has_news_ = false;
  hub_.read_news(seat_);
  if (seat_.news.empty()) {
    if (hub_.failure_) return *hub_.failure_;
    return std::optional<WarmProcess::News>();
  }
  const WarmProcess::News news = seat_.news.front();
  seat_.news.pop_front();
  return std::optional(news);
}

void WarmSeat::close() {
  MutexLock lock(hub_.mutex_);
  if (hub_.seats_.erase(&seat_) == 0) return;
  for (const uint64_t job : seat_.jobs) {
    static_cast<void>(hub_.warm_->end(job));  // if the warm process has ended, so have its jobs
    hub_.owners_.erase(job);
  }
  seat_.waker = nullptr;
  seat_.news.clear();
  seat_.jobs.clear();
}

}  // namespace penstock::server
