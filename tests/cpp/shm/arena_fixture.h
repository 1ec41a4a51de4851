// SPDX-License-Identifier: Apache-2.0
#pragma once
// Both sides of one arena in one process, and memfds made by hand.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>

#include "shm/arena.h"

namespace penstock::shm {

inline uint64_t page_bytes() { return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)); }

class ArenaTest : public testing::Test {
 protected:
  void open(const ArenaSpec& spec) {
    auto arena = Arena::create(spec, /*arena_id=*/7);
    ASSERT_TRUE(arena) << arena.error().message;
    arena_ = std::move(arena).value();
    auto view = ArenaView::map(FileDescriptor(::dup(arena_->fd())));
    ASSERT_TRUE(view) << view.error().message;
    view_ = std::move(view).value();
  }

  // Acquires every slab that is free and returns how many there were.
  uint32_t acquire_all() {
    uint32_t count = 0;
    while (arena_->try_acquire()) ++count;
    return count;
  }
  void release(uint32_t slab_index) { view_->release(slab_index, arena_->generation(slab_index)); }

  // The memory that the arena's file takes.
  uint64_t file_memory_bytes() const {
    struct stat status {};
    ::fstat(arena_->fd(), &status);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  }

  std::shared_ptr<Arena> arena_;
  std::shared_ptr<ArenaView> view_;
};

constexpr int kArenaSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The control page as PROTOCOL.md lays it out, made here from its words and not from the product's struct.
struct ControlPage {
  uint32_t magic = 0x31414e50;
  uint32_t slab_count = 2;
  uint64_t slab_bytes = 0;
  uint64_t control_bytes = 0;
};
static_assert(sizeof(ControlPage) == 24);

inline FileDescriptor make_memfd(const ControlPage& page, uint64_t file_bytes, int seals = kArenaSeals) {
  FileDescriptor fd(::memfd_create("penstock-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(file_bytes)), 0);
  const size_t page_size = std::min<uint64_t>(sizeof page, file_bytes);
  EXPECT_EQ(::pwrite(fd.get(), &page, page_size, 0), static_cast<ssize_t>(page_size));
  EXPECT_EQ(seals == 0 ? 0 : ::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

}  // namespace penstock::shm
