// SPDX-License-Identifier: Apache-2.0
// How a warm process begins; job_host_test.cpp has the rest. Against warm_main.cpp.
#include "server/warm_process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shm/channel.h"
#include "warm_jobs.h"
#include "wire/reports.h"

namespace penstock::server {
namespace {

using std::chrono::minutes;
using std::chrono::steady_clock;

std::unique_ptr<WarmProcess> started(const std::string& word) {
  return WarmProcess::start({PENSTOCK_TEST_BINARY_DIR "/warm_main", word}).value();
}

Result<WarmFacts> facts_of(const std::string& word) {
  return started(word)->wait_until_ready(steady_clock::now() + minutes(1));
}

TEST(WarmProcess, TellsOfItselfOnceItIsReady) {
  const auto facts = facts_of("forks");
  ASSERT_TRUE(facts) << facts.error().message;
  EXPECT_EQ(facts.value().numerics, (Numerics{1, 2, 3}));
  EXPECT_EQ(facts.value().torch, 0x020f);
  EXPECT_EQ(facts.value().job_kinds, wire::kind_bit(wire::JobKind::kPlugin));
  EXPECT_EQ(facts.value().about, "a warm process of tests");
}

TEST(WarmProcess, ThatIsNotReadyIsATimeoutAndMayBeWaitedForAgain) {
  const auto warm = started("is_never_ready");
  for (int round = 0; round < 2; ++round) {
    const auto facts = warm->wait_until_ready(steady_clock::now() - minutes(1));
    ASSERT_FALSE(facts);
    EXPECT_EQ(facts.error().code, Errc::kTimeout);
  }
}

TEST(WarmProcess, ThatEndsBeforeItIsReadyIsClosedAndSaysHow) {
  const auto facts = facts_of("ends_at_once");
  ASSERT_FALSE(facts);
  EXPECT_EQ(facts.error().code, Errc::kClosed);
  EXPECT_NE(facts.error().message.find("ended with exit code 9"), std::string::npos) << facts.error().message;
}

TEST(WarmProcess, ThatBeginsWithSomethingElseIsMalformed) {
  const auto facts = facts_of("begins_wrongly");
  ASSERT_FALSE(facts);
  EXPECT_EQ(facts.error().code, Errc::kMalformed);
}

TEST(WarmProcess, OfAnotherVersionIsAMismatchThatNamesBoth) {
  const auto facts = facts_of("begins_in_another_version");
  ASSERT_FALSE(facts);
  EXPECT_EQ(facts.error().code, Errc::kMismatch);
  for (const int version : {wire::kJobVersion + 8, int{wire::kJobVersion}}) {
    EXPECT_NE(facts.error().message.find("version " + std::to_string(version)), std::string::npos)
        << facts.error().message;
  }
}

TEST(WarmProcess, OfAProgramThatIsNotThereCannotBeStarted) {
  const auto warm = WarmProcess::start({PENSTOCK_TEST_BINARY_DIR "/no_such_program"});
  ASSERT_FALSE(warm);
  EXPECT_NE(warm.error().message.find("no_such_program"), std::string::npos) << warm.error().message;
}

// Several workers at one warm process. Against warm_main.cpp.

using WarmKind = wire::WarmMessage::Kind;

bool is_readable(int fd) {
  constexpr int kPatienceMs = 60'000;
  pollfd item{.fd = fd, .events = POLLIN, .revents = 0};
  return ::poll(&item, 1, kPatienceMs) == 1;
}

// One worker's side, as its I/O thread sees it.
class Sitter {
 public:
  explicit Sitter(WarmHub& hub) : seat_(hub) { seat_.set_waker(waker_); }

  WarmSeat& seat() { return seat_; }
  // The number of the job, whose process lives while this does.
  Result<uint64_t> fork() {
    auto ends = shm::Channel::open_pair().value();
    here_.push_back(std::move(ends.here));
    return seat_.fork(ends.there.get(), STDERR_FILENO, "a worker of tests");
  }
  // Waits for its next news, or for the end of the warm process.
  Result<WarmProcess::News> next() {
    for (;;) {
      waker_.begin_turn();
      const auto news = seat_.next_news();
      if (!news) return news.error();
      if (news.value()) return *news.value();
      sleep();
    }
  }
  // Whether its seat has woken it since its last turn, or does so soon.
  bool is_woken() {
    const bool is_asleep = waker_.begin_sleep();
    const bool is_woken = !is_asleep || is_readable(waker_.fd());
    waker_.end_sleep(is_asleep && is_woken);
    return is_woken;
  }

 private:
  void sleep() {
    if (!waker_.begin_sleep()) return waker_.end_sleep(false);
    pollfd items[] = {{.fd = waker_.fd(), .events = POLLIN, .revents = 0},
                      {.fd = seat_.fd(), .events = POLLIN, .revents = 0}};
    ::poll(items, 2, -1);
    waker_.end_sleep(items[0].revents != 0);
  }

  Waker waker_;
  std::vector<FileDescriptor> here_;  // of channels to its jobs
  WarmSeat seat_;
};

class WarmHubTest : public testing::Test {
 protected:
  void start(const std::string& word = "forks") {
    auto warm = WarmProcess::start({PENSTOCK_TEST_BINARY_DIR "/warm_main", word}).value();
    ASSERT_TRUE(warm->wait_until_ready(steady_clock::now() + minutes(1)));
    warm_pid_ = warm->pid();
    hub_.emplace(std::move(warm));
    first_.emplace(*hub_);
    second_.emplace(*hub_);
  }

  pid_t warm_pid_ = 0;
  std::optional<WarmHub> hub_;
  std::optional<Sitter> first_;
  std::optional<Sitter> second_;
};

TEST_F(WarmHubTest, EachSeatHearsOfItsOwnJobsWhoeverReads) {
  start();
  const uint64_t a = first_->fork().value();
  const uint64_t b = second_->fork().value();
  EXPECT_NE(a, b);
  const auto of_b = second_->next().value();  // which reads that of the first, too
  EXPECT_EQ(of_b.kind, WarmKind::kStarted);
  EXPECT_EQ(of_b.job, b);
  const auto of_a = first_->next().value();
  EXPECT_EQ(of_a.kind, WarmKind::kStarted);
  EXPECT_EQ(of_a.job, a);
  ASSERT_TRUE(first_->seat().end(a));
  const auto end = first_->next().value();
  EXPECT_EQ(end.kind, WarmKind::kEnded);
  EXPECT_EQ(end.job, a);
  EXPECT_EQ(end.pid, of_a.pid);
  EXPECT_EQ(::kill(of_b.pid, 0), 0) << "the other's goes on";
}

TEST_F(WarmHubTest, ReaderOfAnothersNewsWakesThatOne) {
  start();
  ASSERT_TRUE(first_->fork());
  ASSERT_TRUE(is_readable(second_->seat().fd()));
  const auto news = second_->seat().next_news();
  ASSERT_TRUE(news);
  EXPECT_FALSE(news.value()) << "it is of the other's job";
  EXPECT_TRUE(first_->is_woken());
  EXPECT_EQ(first_->next().value().kind, WarmKind::kStarted);
}

TEST_F(WarmHubTest, EndOfTheWarmProcessIsToldToEachSeat) {
  start();
  const uint64_t job = first_->fork().value();
  EXPECT_EQ(first_->next().value().job, job);
  ASSERT_EQ(::kill(warm_pid_, SIGKILL), 0);
  for (auto* const sitter : {&*second_, &*first_}) {
    const auto news = sitter->next();
    ASSERT_FALSE(news);
    EXPECT_EQ(news.error().code, Errc::kFailed);
    EXPECT_NE(news.error().message.find("was ended by SIGKILL"), std::string::npos) << news.error().message;
  }
  EXPECT_FALSE(first_->fork());
}

TEST_F(WarmHubTest, SeatThatIsClosedEndsItsJobsAlone) {
  start();
  static_cast<void>(first_->fork().value());
  const pid_t mine = first_->next().value().pid;
  static_cast<void>(second_->fork().value());
  const pid_t other = second_->next().value().pid;
  first_->seat().close();
  const auto refused = first_->fork();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kClosed);
  first_.reset();
  // The news of the other's next job comes behind that of the end.
  while (::kill(mine, 0) == 0 || errno != ESRCH) {
    static_cast<void>(second_->fork().value());
    EXPECT_EQ(second_->next().value().kind, WarmKind::kStarted);
  }
  EXPECT_EQ(::kill(other, 0), 0);
}

}  // namespace
}  // namespace penstock::server
