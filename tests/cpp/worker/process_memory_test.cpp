// SPDX-License-Identifier: Apache-2.0
#include "worker/process_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../base/child_process.h"

namespace penstock::worker {
namespace {

constexpr std::string_view kTable =
    "1000-3000 r--p 00000000 08:01 12 /lib/some thing.so\n"
    "3000-4000 rw-p 00000000 00:00 0 \n"
    "5000-6000 rw-s 00000000 00:01 7 /memfd:arena (deleted)\n"
    "6000-7000 r--s 00000000 00:01 8 /data/rows.npy\n";

std::span<const std::byte> memory_at(uintptr_t begin, uintptr_t end) {
  return {reinterpret_cast<const std::byte*>(begin), end - begin};
}

MemoryKind kind_in_table(uintptr_t begin, uintptr_t end) {
  return ProcessMemory::parse(kTable).value().kind_of(memory_at(begin, end));
}

TEST(ProcessMemory, TellsWhoCanWrite) {
  EXPECT_EQ(kind_in_table(0x1000, 0x3000), MemoryKind::kReadOnly);
  EXPECT_EQ(kind_in_table(0x3800, 0x3801), MemoryKind::kOwn);
  EXPECT_EQ(kind_in_table(0x5000, 0x5010), MemoryKind::kShared);
  EXPECT_EQ(kind_in_table(0x6ff0, 0x7000), MemoryKind::kReadOnly);
}

TEST(ProcessMemory, OfSeveralMappingsTheOneThatAllowsMostCounts) {
  EXPECT_EQ(kind_in_table(0x2ff0, 0x3010), MemoryKind::kOwn);
  EXPECT_EQ(kind_in_table(0x5ff0, 0x6010), MemoryKind::kShared);
}

TEST(ProcessMemory, WhatIsNotMappedIsUnknown) {
  EXPECT_EQ(kind_in_table(0x10, 0x20), MemoryKind::kUnknown);
  EXPECT_EQ(kind_in_table(0x3ff0, 0x5010), MemoryKind::kUnknown) << "there is a hole";
  EXPECT_EQ(kind_in_table(0x6ff0, 0x7001), MemoryKind::kUnknown);
}

TEST(ProcessMemory, EmptyMemoryCannotBeWritten) { EXPECT_EQ(kind_in_table(0x10, 0x10), MemoryKind::kReadOnly); }

TEST(ProcessMemory, EveryTruncationIsMalformedOrHasTheLinesBefore) {
  const std::string_view line = kTable.substr(0, kTable.find('\n'));
  for (size_t size = 1; size < line.size(); ++size) {
    const auto parsed = ProcessMemory::parse(line.substr(0, size));
    const bool has_permissions = size >= std::string_view("1000-3000 r--p").size();
    ASSERT_EQ(static_cast<bool>(parsed), has_permissions) << line.substr(0, size);
    if (!parsed) {
      EXPECT_EQ(parsed.error().code, Errc::kMalformed);
    }
  }
}

TEST(ProcessMemory, TheLiveTableKnowsHeapAndMaps) {
  const std::vector<std::byte> heap(1 << 20);
  const auto unmap = [](void* address) { ::munmap(address, 4096); };
  const auto mapped = [&](int protection, int flags) {
    return std::unique_ptr<void, decltype(unmap)>(::mmap(nullptr, 4096, protection, flags | MAP_ANONYMOUS, -1, 0),
                                                  unmap);
  };
  const auto shared = mapped(PROT_READ | PROT_WRITE, MAP_SHARED);
  const auto sealed = mapped(PROT_READ, MAP_SHARED);
  const auto memory = ProcessMemory::read();
  ASSERT_TRUE(static_cast<bool>(memory));
  const auto kind = [&](const void* address) {
    return memory.value().kind_of({static_cast<const std::byte*>(address), 4096});
  };
  EXPECT_EQ(kind(heap.data()), MemoryKind::kOwn);
  EXPECT_EQ(kind(shared.get()), MemoryKind::kShared);
  EXPECT_EQ(kind(sealed.get()), MemoryKind::kReadOnly);
}

}  // namespace
}  // namespace penstock::worker

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
