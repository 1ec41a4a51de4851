// SPDX-License-Identifier: Apache-2.0
#include "base/process.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "child_process.h"

namespace penstock {
namespace {

std::string limits_after(rlim_t soft, rlim_t hard) {
  return test::in_child([&]() -> std::string {
    const rlimit given{.rlim_cur = soft, .rlim_max = hard};
    if (::setrlimit(RLIMIT_NOFILE, &given) != 0) return "the limit could not be set";
    const DescriptorLimit raised = raise_descriptor_limit();
    rlimit found{};
    ::getrlimit(RLIMIT_NOFILE, &found);
    return std::to_string(raised.before) + " to " + std::to_string(raised.now) + ", found " +
           std::to_string(descriptor_limit()) + " of " + std::to_string(found.rlim_max);
  });
}

// A stranger who opened 1,100 connections to a worker's port made the dataset's next open() fail.
TEST(DescriptorLimit, IsRaisedToTheHardOne) {
  EXPECT_EQ(limits_after(200, 400), "200 to 400, found 400 of 400");
  EXPECT_EQ(limits_after(400, 400), "400 to 400, found 400 of 400");
}

// Python would notice Ctrl-C late.
TEST(OwnThread, LeavesSignalsToTheProgramsThreads) {
  std::array<char, 16> name{};
  bool is_blocked = false;
  std::thread([&] {
    begin_own_thread("pk_test");
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    sigset_t blocked;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    is_blocked = ::sigismember(&blocked, SIGINT) == 1 && ::sigismember(&blocked, SIGTERM) == 1;
  }).join();
  EXPECT_STREQ(name.data(), "pk_test");
  EXPECT_TRUE(is_blocked);
  sigset_t blocked;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  EXPECT_EQ(::sigismember(&blocked, SIGINT), 0);
}

}  // namespace
}  // namespace penstock

// The sanitizers bring allocators of their own.

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
#define PENSTOCK_TEST_OTHER_ALLOCATOR
#endif

namespace penstock {
namespace {

#ifndef PENSTOCK_TEST_OTHER_ALLOCATOR

constexpr size_t kMessageBytes = 1 << 20;
constexpr int kMessageCount = 4;  // that wait at a time

int64_t minor_fault_count() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

void use_messages() {
  void* messages[kMessageCount];
  for (void*& message : messages) {
    message = std::malloc(kMessageBytes);
    std::memset(message, 1, kMessageBytes);
    asm volatile("" : : "g"(message) : "memory");  // the compiler would leave both out
  }
  for (void* message : messages) std::free(message);
}

// Page faults of a thread that receives 32 messages after some that warm up.
std::string faults_of_messages() {
  int64_t count = 0;
  std::thread([&] {
    use_messages();
    use_messages();
    count = -minor_fault_count();
    for (int round = 0; round < 8; ++round) use_messages();
    count += minor_fault_count();
  }).join();
  return std::to_string(count);
}

TEST(HeapThresholds, MessagesUseTheSameMemoryAgain) {
  const auto report = test::in_child([] {
    raise_heap_thresholds();
    return faults_of_messages();
  });
  EXPECT_LT(std::stoll(report), 64);
}

TEST(HeapThresholds, WithoutThemMessagesFaultTheirPagesInAgain) {
  EXPECT_GT(std::stoll(test::in_child(faults_of_messages)), 512) << "if this is false it is not needed any more";
}

#else

TEST(HeapThresholds, AreGlibcs) { GTEST_SKIP() << "this build has another allocator"; }

#endif

// Counts in memory that a fork copies, so that each process sees its own destructions only.
struct Counted {
  explicit Counted(int* destroyed_count) : destroyed_count(destroyed_count) {}
  ~Counted() { ++*destroyed_count; }
  int* destroyed_count;
  int value = 3;
};

// The exit status of a child that runs `body`. Leaves by _exit: nothing of the parent's is torn down.
template <typename Body>
int status_of_child(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = -1;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ProcessBound, DestroysItsObjectInTheProcessThatMadeIt) {
  int destroyed_count = 0;
  {
    const ProcessBound<Counted> bound(std::make_unique<Counted>(&destroyed_count));
    EXPECT_TRUE(bound.is_owner());
    EXPECT_EQ(bound->value, 3);
    EXPECT_EQ((*bound).value, 3);
  }
  EXPECT_EQ(destroyed_count, 1);
}

TEST(ProcessBound, LeavesItsObjectAloneInAForkedChild) {
  int destroyed_count = 0;
  std::optional<ProcessBound<Counted>> bound(std::in_place, std::make_unique<Counted>(&destroyed_count));
  const int child_status = status_of_child([&] {
    const bool was_owner = bound->is_owner();
    bound.reset();
    return was_owner ? 100 : destroyed_count;
  });
  EXPECT_EQ(child_status, 0) << "100: took itself for the owner; 1: destroyed its copy";
  bound.reset();
  EXPECT_EQ(destroyed_count, 1);
}

}  // namespace
}  // namespace penstock
