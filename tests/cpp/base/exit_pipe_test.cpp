// SPDX-License-Identifier: Apache-2.0
#include "base/exit_pipe.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <string_view>

#include "base/file_descriptor.h"

namespace penstock {
namespace {

class ExitPipeTest : public testing::Test {
 protected:
  void write(std::string_view bytes) const {
    ASSERT_EQ(::write(pipe_.write_fd(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }

  ExitPipe pipe_ = ExitPipe::open().value();
};

TEST_F(ExitPipeTest, NothingIsToldBeforeTheProcessTellsIt) {
  EXPECT_TRUE(pipe_.read());
  EXPECT_FALSE(pipe_.has_served());
  EXPECT_EQ(pipe_.end(), std::nullopt);
}

TEST_F(ExitPipeTest, EachWordCrossesWithItsText) {
  for (const ExitWord word : {ExitWord::kDrained, ExitWord::kUseless, ExitWord::kFailed}) {
    write_exit_line(pipe_.write_fd(), word, "why of " + std::string(name_of(word)));
    EXPECT_TRUE(pipe_.read());
    EXPECT_EQ(pipe_.end(), word);
    EXPECT_EQ(pipe_.text(), "why of " + std::string(name_of(word)));
    EXPECT_EQ(exit_word_named(name_of(word)), word);
  }
}

TEST_F(ExitPipeTest, ServingIsNoEndAndTheLastWordCounts) {
  write_exit_line(pipe_.write_fd(), ExitWord::kFailed, "a line\nof two");
  write_exit_line(pipe_.write_fd(), ExitWord::kDrained);
  write_exit_line(pipe_.write_fd(), ExitWord::kServing);
  EXPECT_TRUE(pipe_.read());
  EXPECT_TRUE(pipe_.has_served());
  EXPECT_EQ(pipe_.end(), ExitWord::kDrained);
  EXPECT_EQ(pipe_.text(), "");
}

TEST_F(ExitPipeTest, WorkersThatHaveLeftAreNoEndOfTheProcess) {
  EXPECT_TRUE(pipe_.left().empty());
  write_exit_line(pipe_.write_fd(), ExitWord::kLeft, "2");
  write_exit_line(pipe_.write_fd(), ExitWord::kLeft, "0");
  write("left\nleft x\nleft -1\nleft 1 \nleft 99999999\nleft 99999999999999999999\n");
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.left(), (std::set<size_t>{0, 2}));
  EXPECT_EQ(pipe_.end(), std::nullopt);
  EXPECT_FALSE(pipe_.has_served());
}

TEST_F(ExitPipeTest, WhatADatasetWritesThereIsIgnored) {
  write("\n \nDRAINED\ndrainedly\nuseless-ish x\n");
  write(std::string(3 * kExitLineBytesMax, 'x'));
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), std::nullopt);
  write("y\n");
  write_exit_line(pipe_.write_fd(), ExitWord::kFailed, "why");
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kFailed);
  EXPECT_EQ(pipe_.text(), "why");
}

TEST_F(ExitPipeTest, LongTextIsCutOff) {
  write_exit_line(pipe_.write_fd(), ExitWord::kFailed, std::string(100 * kExitLineBytesMax, 'x'));
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.text(), std::string(kExitLineBytesMax - 1 - std::string_view("failed ").size(), 'x'));
}

TEST_F(ExitPipeTest, FullPipeStopsNobody) {
  const std::string lines(kExitLineBytesMax, '\n');
  while (::write(pipe_.write_fd(), lines.data(), lines.size()) > 0) {
  }
  write_exit_line(pipe_.write_fd(), ExitWord::kDrained);
  EXPECT_TRUE(pipe_.read());
  write_exit_line(pipe_.write_fd(), ExitWord::kDrained);
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kDrained);
}

// A child that a dataset had forked lived on after its worker: the supervisor must not wait for it.
TEST_F(ExitPipeTest, ProcessThatKeepsThePipeOpenHoldsUpNobody) {
  FileDescriptor of_forked_child(::dup(pipe_.write_fd()));
  write_exit_line(pipe_.write_fd(), ExitWord::kFailed, "why");
  pipe_.close_write();
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.text(), "why");
  of_forked_child.reset();
  EXPECT_FALSE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kFailed);
}

TEST(ExitLine, IsWrittenNowhereWithoutAPipe) { write_exit_line(-1, ExitWord::kFailed, "why"); }

}  // namespace
}  // namespace penstock
