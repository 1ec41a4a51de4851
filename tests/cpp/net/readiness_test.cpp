// SPDX-License-Identifier: Apache-2.0
#include "net/readiness.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>

namespace penstock::net {
namespace {

using std::chrono::seconds;

TEST(Readiness, WaitMarksTheDescriptorsThatAreReadable) {
  std::array<int, 2> first{};
  std::array<int, 2> second{};
  ASSERT_EQ(::pipe(first.data()), 0);
  ASSERT_EQ(::pipe(second.data()), 0);
  ASSERT_EQ(::write(second[1], "x", 1), 1);
  const std::array<int, 3> fds = {first[0], second[0], -1};
  std::array<bool, 3> is_readable = {true, false, true};
  ASSERT_TRUE(wait_readable({}, fds, is_readable, seconds(30)));
  EXPECT_EQ(is_readable, (std::array<bool, 3>{false, true, false}));
  for (const int fd : {first[0], first[1], second[0], second[1]}) ::close(fd);
}

TEST(Readiness, HangUpEndsAWait) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  ::close(ends[1]);
  const std::array<int, 1> fds = {ends[0]};
  std::array<bool, 1> is_readable = {false};
  ASSERT_TRUE(wait_readable({}, fds, is_readable, seconds(30)));
  EXPECT_TRUE(is_readable[0]);
  ::close(ends[0]);
}

}  // namespace
}  // namespace penstock::net
