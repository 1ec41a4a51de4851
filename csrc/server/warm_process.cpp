// SPDX-License-Identifier: Apache-2.0
#include "server/warm_process.h"

#include <array>
#include <csignal>
#include <span>
#include <utility>

namespace penstock::server {

using std::chrono::steady_clock;
using wire::WarmMessage;

namespace {

// For the job processes and then the warm process to end, before it is killed; the job processes die with it.
constexpr auto kEndMax = std::chrono::seconds(3);
constexpr auto kReapMax = std::chrono::seconds(1);  // for the end of a process that has closed its channel

}  // namespace

Result<std::unique_ptr<WarmProcess>> WarmProcess::start(std::vector<std::string> command) {
  auto ends = shm::Channel::open_pair();
  if (!ends) return ends.error();
  const int there = ends.value().there.get();
  command.push_back(std::to_string(there));
  auto process = ChildProcess::start({.command = std::move(command), .passed_fd = there, .has_own_session = true});
  if (!process) return process.error();
  return std::make_unique<WarmProcess>(std::move(process).value(), shm::Channel(std::move(ends.value().here)));
}

WarmProcess::WarmProcess(ChildProcess process, shm::Channel channel)
    : process_(std::move(process)), channel_(std::move(channel)) {}

WarmProcess::~WarmProcess() {
  channel_.shut_down();
  if (!process_.wait_until(steady_clock::now() + kEndMax)) process_.signal(SIGKILL);
}

Fault WarmProcess::ended() {
  static_cast<void>(process_.wait_until(steady_clock::now() + kReapMax));
  const auto& end = process_.poll();
  return {Errc::kClosed,
          "the process that forks job processes " + (end ? end->describe() : "closed its channel to the server")};
}

Result<WarmFacts> WarmProcess::wait_until_ready(steady_clock::time_point deadline) {
  const auto received = channel_.receive(deadline);
  if (!received && received.error().code == Errc::kClosed) return ended();
  if (!received) return received.error();
  const auto message = wire::parse_warm_message(received.value().bytes);
  if (!message) return message.error();
  if (message.value().kind != WarmMessage::Kind::kReady)
    return Fault{Errc::kMalformed, "a warm process must report that it is ready first"};
  return WarmFacts{.numerics = message.value().numerics,
                   .torch = message.value().torch,
                   .job_kinds = message.value().job_kinds,
                   .about = std::string(message.value().text)};
}

Result<void> WarmProcess::fork(uint64_t job, int channel, int errors, const std::string& log_name) {
  const std::array<int, 2> fds{channel, errors};
  return send({.kind = WarmMessage::Kind::kFork, .job = job, .text = log_name}, fds);
}

Result<void> WarmProcess::end(uint64_t job) { return send({.kind = WarmMessage::Kind::kEnd, .job = job}); }

Result<void> WarmProcess::send(const WarmMessage& message, std::span<const int> fds) {
  const auto bytes = wire::write_warm_message(message);
  const std::span<const std::byte> part(bytes);
  // The warm process only reads these messages, and they are few: the socket has room for a thousand.
  return channel_.send({&part, 1}, fds);
}

Result<std::optional<WarmProcess::News>> WarmProcess::next_news() {
  for (;;) {
    const auto received = channel_.next();
    if (!received) return received.error();
    if (received.value()) {
      const auto message = wire::parse_warm_message(received.value()->bytes);
      if (!message) return message.error();
      const WarmMessage& news = message.value();
      if (news.kind != WarmMessage::Kind::kStarted && news.kind != WarmMessage::Kind::kEnded)
        return Fault{Errc::kMalformed, "a warm process must report only its job processes once it is ready"};
      return std::optional(News{.kind = news.kind, .job = news.job, .pid = news.pid, .status = news.status});
    }
    const auto filled = channel_.fill();
    if (!filled && filled.error().code == Errc::kClosed) return ended();
    if (!filled) return filled.error();
    if (!filled.value()) return std::optional<News>();
  }
}

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
