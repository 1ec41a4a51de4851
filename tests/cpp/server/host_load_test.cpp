// SPDX-License-Identifier: Apache-2.0
#include "server/host_load.h"

#include <gtest/gtest.h>

#include <regex>

namespace penstock::server {
namespace {

constexpr std::string_view kMeminfo =
    "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   18000000 kB\nBuffers: 5 kB\n";

TEST(Meminfo, UsedMemoryExcludesWhatTheKernelCouldGiveAway) {
  const auto memory = parse_meminfo(kMeminfo);
  ASSERT_TRUE(memory) << memory.error().message;
  EXPECT_EQ(memory.value().total_bytes, 24'000'000ull * 1024);
  EXPECT_EQ(memory.value().used_bytes, 6'000'000ull * 1024);
}

TEST(Meminfo, IncompleteTablesAreRefused) {
  for (const std::string_view table :
       {"", "MemTotal: 5 kB\n", "MemAvailable: 5 kB\n", "MemTotal: x kB\n", "MemTotal: 5 kB\nMemAvailable: 6 kB\n"})
    EXPECT_FALSE(parse_meminfo(table)) << table;
}

TEST(HostLoadMeter, ReadsThisMachineOnceInAnInterval) {
  HostLoadMeter meter;
  const Instant now{};
  const wire::HostLoad first = meter.read(now);
  EXPECT_GT(first.cpu_count, 0);
  EXPECT_GT(first.memory_bytes, first.memory_used_bytes);
  EXPECT_GT(first.memory_used_bytes, 0);
  EXPECT_EQ(first.cpu_permille, 0);  // nothing to compare with
  EXPECT_EQ(meter.read(now + kHostLoadInterval - std::chrono::milliseconds(1)), first);
  // More CPU time than the machine could have used in this time, so the share is limited.
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  while (std::chrono::steady_clock::now() < end) continue;
  EXPECT_LE(meter.read(now + kHostLoadInterval).cpu_permille, 1000);
}

std::string without_times(const LogTail& tail) {
  return std::regex_replace(tail.text(), std::regex(R"(\d\d:\d\d:\d\d )"), "");
}

TEST(LogTail, KeepsTheLastLines) {
  LogTail tail;
  EXPECT_EQ(tail.text(), "");
  for (const char* text : {"one", "two", "three", "four"}) tail.add(text);
  EXPECT_EQ(without_times(tail), "two\nthree\nfour");
  tail.add(std::string(1000, 'x') + "\n");
  EXPECT_LE(tail.text().size(), wire::kLogBytesMax);
  tail.add(std::string("a\nb\0c", 5));
  EXPECT_EQ(without_times(tail).substr(without_times(tail).rfind('\n') + 1), "a b c");
}

TEST(LogTail, OfTheOutputOfJobsItKeepsTheLinesOfTheWorkerAlone) {
  LogTail tail;
  tail.add_output("Downloading...\n2026-11-29T22:10:19+0000 penstock worker 3f2a on node7: serves tr",
                  "penstock worker 3f2a");
  EXPECT_EQ(tail.text(), "");
  tail.add_output("ain.py: Images\n50 %\n", "penstock worker 3f2a");
  EXPECT_EQ(without_times(tail), "serves train.py: Images");
  tail.add_output(std::string(10'000, 'x'), "penstock worker 3f2a");  // a line that does not end
  tail.add_output("\nx penstock worker 3f2a on node7: has finished\n", "penstock worker 3f2a");
  EXPECT_EQ(without_times(tail), "serves train.py: Images\nhas finished");
}

}  // namespace
}  // namespace penstock::server
