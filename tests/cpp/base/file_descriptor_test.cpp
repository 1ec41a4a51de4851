// SPDX-License-Identifier: Apache-2.0
#include "base/file_descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <utility>

namespace penstock {
namespace {

int open_null_device() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }
bool is_open(int fd) { return ::fcntl(fd, F_GETFD) != -1; }

TEST(FileDescriptor, ClosesWhenItDies) {
  const int fd = open_null_device();
  {
    const FileDescriptor owner(fd);
    EXPECT_TRUE(owner);
    EXPECT_EQ(owner.get(), fd);
    EXPECT_TRUE(is_open(fd));
  }
  EXPECT_FALSE(is_open(fd));
}

TEST(FileDescriptor, IsEmptyAtFirst) {
  const FileDescriptor nothing;
  EXPECT_FALSE(nothing);
  EXPECT_EQ(nothing.get(), -1);
}

TEST(FileDescriptor, DescriptorZeroIsADescriptor) {
  FileDescriptor owner(0);
  EXPECT_TRUE(owner);
  EXPECT_EQ(owner.release(), 0);
}

TEST(FileDescriptor, MovingLeavesTheSourceEmptyAndTheFileOpen) {
  const int fd = open_null_device();
  FileDescriptor source(fd);
  const FileDescriptor target(std::move(source));
  EXPECT_FALSE(source);
  EXPECT_EQ(target.get(), fd);
  EXPECT_TRUE(is_open(fd));
}

TEST(FileDescriptor, AssigningClosesWhatWasThere) {
  const int first = open_null_device();
  const int second = open_null_device();
  FileDescriptor owner(first);
  owner = FileDescriptor(second);
  EXPECT_FALSE(is_open(first));
  EXPECT_TRUE(is_open(second));
  EXPECT_EQ(owner.get(), second);
}

TEST(FileDescriptor, AssigningToItselfKeepsTheFile) {
  const int fd = open_null_device();
  FileDescriptor owner(fd);
  FileDescriptor& itself = owner;
  owner = std::move(itself);
  EXPECT_EQ(owner.get(), fd);
  EXPECT_TRUE(is_open(fd));
}

TEST(FileDescriptor, ReleasingGivesTheFileAway) {
  const int fd = open_null_device();
  FileDescriptor owner(fd);
  EXPECT_EQ(owner.release(), fd);
  EXPECT_FALSE(owner);
  EXPECT_TRUE(is_open(fd));
  ::close(fd);
}

TEST(FileDescriptor, ResettingClosesOnce) {
  const int fd = open_null_device();
  FileDescriptor owner(fd);
  owner.reset();
  EXPECT_FALSE(is_open(fd));
  const int reused = open_null_device();
  ASSERT_EQ(reused, fd) << "the lowest free descriptor is given out again";
  owner.reset();
  EXPECT_TRUE(is_open(reused));
  ::close(reused);
}

}  // namespace
}  // namespace penstock
