// SPDX-License-Identifier: Apache-2.0
#include "server/job_output.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <string_view>

namespace penstock::server {
namespace {

constexpr std::string_view kLogName = "penstock worker 3f2a";

class JobOutputTest : public testing::Test {
 protected:
  void write(std::string_view text) {
    ASSERT_EQ(::write(ends_.there.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }

  JobOutput::Ends ends_ = JobOutput::open().value();
};

TEST_F(JobOutputTest, IsReadAsFarAsItHasCome) {
  EXPECT_EQ(ends_.here.read(), "");
  write("a line\nand");
  EXPECT_EQ(ends_.here.read(), "a line\nand");
  EXPECT_EQ(ends_.here.read(), "");
  EXPECT_GE(ends_.here.fd(), 0);
  ends_.there.reset();
  EXPECT_EQ(ends_.here.read(), "");
  EXPECT_EQ(ends_.here.fd(), -1);
  EXPECT_EQ(ends_.here.last_output(kLogName), "a line | and");
}

TEST_F(JobOutputTest, OneTurnTakesAStepOfIt) {
  const std::string step(kOutputStepBytes / 2, 'x');
  write(step);
  write("y");
  EXPECT_EQ(ends_.here.read(), step + "y");
}

TEST_F(JobOutputTest, LastWordsAreWholeLines) {
  EXPECT_EQ(ends_.here.last_output(kLogName), "");
  const std::string words(kLastOutputBytesMax / 4, 'x');
  for (int count = 0; count < 10; ++count) {
    write(words + "\n");
    ends_.here.read();
  }
  EXPECT_EQ(ends_.here.last_output(kLogName), words + " | " + words + " | " + words);
}

TEST_F(JobOutputTest, LastWordsAreOneLineWithoutWhatIsEmpty) {
  write("\n Traceback:\n\n    in a file\r\n\n");
  ends_.here.read();
  EXPECT_EQ(ends_.here.last_output(kLogName), "Traceback: | in a file");
}

TEST_F(JobOutputTest, IsReadableOnceItWasFoundToBeAndUntilItIsRead) {
  EXPECT_FALSE(ends_.here.is_readable());
  ends_.here.note_readable();
  EXPECT_TRUE(ends_.here.is_readable());
  EXPECT_EQ(ends_.here.read(), "");
  EXPECT_FALSE(ends_.here.is_readable());
}

TEST_F(JobOutputTest, LastWordsOfALineThatIsTooLongAreItsEnd) {
  write(std::string(2 * kLastOutputBytesMax, 'x') + "end\n\n");
  ends_.here.read();
  const std::string words = ends_.here.last_output(kLogName);
  EXPECT_TRUE(words.ends_with("xend")) << words;
  EXPECT_LE(words.size(), kLastOutputBytesMax);
}

TEST_F(JobOutputTest, LinesOfTheLogAreNoLastWords) {
  write("2026-01-02T03:04:05+0000 penstock worker 3f2a on host: serves job of trainer 12345678\n");
  ends_.here.read();
  EXPECT_EQ(ends_.here.last_output(kLogName), "");
  write("there is no disk\n2026-01-02T03:04:05+0000 penstock worker 3f2a on host: has finished job\n");
  ends_.here.read();
  EXPECT_EQ(ends_.here.last_output(kLogName), "there is no disk");
}

TEST(OutputBudget, IsABurstAndThenARate) {
  OutputBudget budget;
  Instant now{std::chrono::hours(1)};
  EXPECT_EQ(budget.take(100, now), 100);
  EXPECT_EQ(budget.take(2 * kOutputBurstBytes, now), kOutputBurstBytes - 100);
  EXPECT_EQ(budget.take(1, now), 0);
  now += std::chrono::seconds(2);
  EXPECT_EQ(budget.take(1 << 20, now), 2 * kOutputBytesPerSecond);
  EXPECT_EQ(budget.take(1, now), 0);
}

TEST(OutputBudget, IsNotLostToCallsThatFollowEachOtherFast) {
  OutputBudget budget;
  Instant now{std::chrono::hours(1)};
  EXPECT_EQ(budget.take(kOutputBurstBytes, now), kOutputBurstBytes);
  size_t taken = 0;
  for (int count = 0; count < 1'000'000; ++count) {
    now += std::chrono::microseconds(10);
    taken += budget.take(100, now);
  }
  EXPECT_NEAR(static_cast<double>(taken), 10.0 * kOutputBytesPerSecond, 0.05 * 10 * kOutputBytesPerSecond);
}

TEST(OutputBudget, OfALongSilenceIsOneBurst) {
  OutputBudget budget;
  const Instant now{std::chrono::hours(1)};
  EXPECT_EQ(budget.take(kOutputBurstBytes, now), kOutputBurstBytes);
  EXPECT_EQ(budget.take(2 * kOutputBurstBytes, now + std::chrono::hours(100)), kOutputBurstBytes);
}

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(FormatDuration, SecondsAreWhole) {
  EXPECT_EQ(format_duration(seconds(60)), "60 s");
  EXPECT_EQ(format_duration(milliseconds(1999)), "1 s");
}

TEST(FormatDuration, LessThanASecondIsInMilliseconds) {
  EXPECT_EQ(format_duration(microseconds(999'999)), "999 ms");
  EXPECT_EQ(format_duration(Duration(0)), "0 ms");
}

}  // namespace
}  // namespace penstock::server
