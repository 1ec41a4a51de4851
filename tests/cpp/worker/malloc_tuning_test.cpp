// SPDX-License-Identifier: Apache-2.0
#include "worker/malloc_tuning.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "../base/child_process.h"

// The sanitizers bring allocators of their own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
#define PENSTOCK_TEST_OTHER_ALLOCATOR
#endif

namespace penstock::worker {
namespace {

#ifndef PENSTOCK_TEST_OTHER_ALLOCATOR

constexpr size_t kBlockBytes = 64 << 20;
constexpr int64_t kBlockPages = kBlockBytes / 4096;

int64_t minor_fault_count() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

void use_a_block() {
  void* block = std::malloc(kBlockBytes);
  std::memset(block, 1, kBlockBytes);
  asm volatile("" : : "g"(block) : "memory");  // the compiler would leave both out
  std::free(block);
}

// Page faults of eight batches that each allocate, write and free a block, after one that warms up.
std::string faults_of_eight_batches() {
  use_a_block();
  const int64_t before = minor_fault_count();
  for (int batch = 0; batch < 8; ++batch) use_a_block();
  return std::to_string(minor_fault_count() - before);
}

TEST(MallocTuning, LargeBlocksAreUsedAgainWithoutPageFaults) {
  const auto report = test::in_child([] {
    tune_malloc();
    return faults_of_eight_batches();
  });
  EXPECT_LT(std::stoll(report), 64) << "page faults in eight batches";
}

TEST(MallocTuning, WithoutItEveryBatchFaultsItsPagesInAgain) {
  EXPECT_GT(std::stoll(test::in_child(faults_of_eight_batches)), 4 * kBlockPages / 512)
      << "if this is false the tuning is not needed any more";
}

#else

TEST(MallocTuning, IsForGlibcsAllocator) { GTEST_SKIP() << "this build has another allocator"; }

#endif

}  // namespace
}  // namespace penstock::worker
