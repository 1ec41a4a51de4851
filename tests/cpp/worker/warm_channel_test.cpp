// SPDX-License-Identifier: Apache-2.0
// What a warm process does about what jobs leave behind. A server is played here, over its end of the channel.
#include "worker/warm_channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include "../base/child_process.h"
#include "shm/channel.h"
#include "wire/job_record.h"

namespace penstock::worker {
namespace {

using wire::WarmMessage;

bool is_there(pid_t pid) { return ::kill(pid, 0) == 0; }

void reap_one(pid_t pid) {
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

// The process of a job: it starts a daemon, whose number it writes, and lives until its server hangs up.
[[noreturn]] void live_as_job(WarmChannel& warm, const WarmChannel::Order& order) {
  warm.close_in_child();
  ::setsid();
  const pid_t middle = ::fork();
  if (middle == 0) {
    ::setsid();
    if (::fork() != 0) ::_exit(0);
    ::signal(SIGTERM, SIG_IGN);
    const pid_t pid = ::getpid();
    static_cast<void>(::write(order.errors.get(), &pid, sizeof pid) < 0);
    for (;;) ::pause();
  }
  reap_one(middle);
  char byte = 0;
  while (::read(order.channel.get(), &byte, 1) < 0 && errno == EINTR) {
  }
  ::_exit(0);
}

[[noreturn]] void live_as_warm(FileDescriptor socket) {
  WarmChannel warm(std::move(socket));
  for (;;) {
    auto next = warm.next();
    if (!next) ::_exit(0);
    const auto* order = std::get_if<WarmChannel::Order>(&next.value());
    if (order == nullptr) continue;
    const pid_t pid = ::fork();
    if (pid == 0) live_as_job(warm, *order);
    static_cast<void>(warm.started(order->job, pid));
  }
}

// The server. Confined to one thread.
class PlayedServer {
 public:
  PlayedServer() {
    auto ends = shm::Channel::open_pair().value();
    warm_pid_ = ::fork();
    if (warm_pid_ == 0) {
      ends.here.reset();
      live_as_warm(std::move(ends.there));
    }
    channel_ = shm::Channel(std::move(ends.here));
  }

  struct StartedJob {
    FileDescriptor channel;
    pid_t pid = 0;
    pid_t daemon = 0;
  };
  StartedJob start(uint64_t number) {
    auto ends = shm::Channel::open_pair().value();
    std::array<int, 2> pipe{};
    if (::pipe2(pipe.data(), O_CLOEXEC) != 0) ::_exit(1);
    const FileDescriptor here(pipe[0]);
    const FileDescriptor there(pipe[1]);
    const std::array<int, 2> fds{ends.there.get(), there.get()};
    send({.kind = WarmMessage::Kind::kFork, .job = number}, fds);
    StartedJob job{.channel = std::move(ends.here), .pid = news(WarmMessage::Kind::kStarted, number)};
    while (::read(here.get(), &job.daemon, sizeof job.daemon) < 0 && errno == EINTR) {
    }
    return job;
  }
  void end(uint64_t number) { send({.kind = WarmMessage::Kind::kEnd, .job = number}); }
  // The process of the news that comes next, which is to be this; 0 for any other.
  pid_t news(WarmMessage::Kind kind, uint64_t number) {
    const auto received = channel_.receive(std::chrono::steady_clock::now() + std::chrono::minutes(1));
    if (!received) return 0;
    const auto message = wire::parse_warm_message(received.value().bytes);
    return message && message.value().kind == kind && message.value().job == number ? message.value().pid : 0;
  }
  void hang_up() {
    channel_ = shm::Channel(FileDescriptor());
    reap_one(warm_pid_);
  }

 private:
  void send(const WarmMessage& message, std::span<const int> fds = {}) {
    const auto bytes = wire::write_warm_message(message);
    const std::span<const std::byte> part(bytes);
    static_cast<void>(channel_.send({&part, 1}, fds));
  }

  shm::Channel channel_{FileDescriptor()};
  pid_t warm_pid_ = -1;
};

TEST(WarmChannel, AnEndIsToldOnceTheJobsDaemonsHaveEndedAndThoseOfOthersLiveOn) {
  EXPECT_EQ(test::in_child([] {
              PlayedServer server;
              auto first = server.start(1);
              auto second = server.start(2);
              if (!is_there(first.daemon) || !is_there(second.daemon)) return std::string("a daemon did not start");
              first.channel.reset();
              if (server.news(WarmMessage::Kind::kEnded, 1) != first.pid) return std::string("no end was told");
              if (is_there(first.daemon)) return std::string("the daemon of the first job lives");
              if (!is_there(second.daemon)) return std::string("the daemon of the second job has ended");
              server.end(2);
              if (server.news(WarmMessage::Kind::kEnded, 2) != second.pid) return std::string("no end was told");
              if (is_there(second.daemon)) return std::string("the daemon of the second job lives");
              server.hang_up();
              return std::string();
            }),
            "");
}

TEST(WarmChannel, DaemonsOfAllJobsEndWithTheServer) {
  EXPECT_EQ(test::in_child([] {
              PlayedServer server;
              const auto first = server.start(1);
              const auto second = server.start(2);
              server.hang_up();
              const bool is_any_there =
                  is_there(first.pid) || is_there(second.pid) || is_there(first.daemon) || is_there(second.daemon);
              return std::string(is_any_there ? "one lives" : "");
            }),
            "");
}

}  // namespace
}  // namespace penstock::worker
