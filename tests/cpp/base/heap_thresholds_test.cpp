// SPDX-License-Identifier: Apache-2.0
#include "base/heap_thresholds.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "child_process.h"

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

}  // namespace
}  // namespace penstock
