// SPDX-License-Identifier: Apache-2.0
#pragma once
// Replaces the operator new of a test's program, by what it notes and whether it fails on each thread. One file of a
// program includes this.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace penstock::test {

inline thread_local size_t largest_allocation_bytes = 0;
inline thread_local bool is_memory_used_up = false;  // nothing more is allocated on this thread

inline void* try_allocate(size_t bytes) noexcept {
  largest_allocation_bytes = std::max(largest_allocation_bytes, bytes);
  return is_memory_used_up ? nullptr : std::malloc(std::max<size_t>(bytes, 1));
}

inline void* allocate(size_t bytes) {
  if (void* memory = try_allocate(bytes); memory != nullptr) return memory;
  throw std::bad_alloc();
}

}  // namespace penstock::test

void* operator new(size_t bytes) { return penstock::test::allocate(bytes); }
void* operator new[](size_t bytes) { return penstock::test::allocate(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return penstock::test::try_allocate(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return penstock::test::try_allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
