// SPDX-License-Identifier: Apache-2.0
#include "server/job_output.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <string_view>

namespace penstock::server {
namespace {

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
  EXPECT_EQ(ends_.here.last_words(), "a line | and");
}

TEST_F(JobOutputTest, OneTurnTakesAStepOfIt) {
  const std::string step(kOutputStepBytes / 2, 'x');
  write(step);
  write("y");
  EXPECT_EQ(ends_.here.read(), step + "y");
}

TEST_F(JobOutputTest, LastWordsAreWholeLines) {
  EXPECT_EQ(ends_.here.last_words(), "");
  const std::string words(kLastWordsBytesMax / 4, 'x');
  for (int count = 0; count < 10; ++count) {
    write(words + "\n");
    ends_.here.read();
  }
  EXPECT_EQ(ends_.here.last_words(), words + " | " + words + " | " + words);
}

TEST_F(JobOutputTest, LastWordsAreOneLineWithoutWhatIsEmpty) {
  write("\n Traceback:\n\n    in a file\r\n\n");
  ends_.here.read();
  EXPECT_EQ(ends_.here.last_words(), "Traceback: | in a file");
}

TEST_F(JobOutputTest, IsReadableOnceItWasFoundToBeAndUntilItIsRead) {
  EXPECT_FALSE(ends_.here.is_readable());
  ends_.here.note_readable();
  EXPECT_TRUE(ends_.here.is_readable());
  EXPECT_EQ(ends_.here.read(), "");
  EXPECT_FALSE(ends_.here.is_readable());
}

TEST_F(JobOutputTest, LastWordsOfALineThatIsTooLongAreItsEnd) {
  write(std::string(2 * kLastWordsBytesMax, 'x') + "end\n\n");
  ends_.here.read();
  const std::string words = ends_.here.last_words();
  EXPECT_TRUE(words.ends_with("xend")) << words;
  EXPECT_LE(words.size(), kLastWordsBytesMax);
}

}  // namespace
}  // namespace penstock::server
