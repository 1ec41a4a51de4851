// SPDX-License-Identifier: Apache-2.0
#include "server/energy_meter.h"

#include <gtest/gtest.h>

#include <chrono>

#include "base/live_clock.h"
#include "powercap_folder.h"
#include "server/cpu_time.h"

namespace penstock::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kRange = 1'000'000'000'000;

// The machine's own clock of busy time counts in hundredths of a second.
void keep_busy(Duration time) {
  const auto until = process_cpu_time() + time;
  while (process_cpu_time() < until) {
  }
}

TEST(BusyTime, IsAllThatIsNeitherIdleNorWaiting) {
  const auto busy = parse_busy_time("cpu  100 20 30 9000 800 4 6 50 7 0\ncpu0 1 2 3\n", 100);
  ASSERT_TRUE(busy) << busy.error().message;
  EXPECT_EQ(busy.value(), milliseconds(1600));
}

TEST(BusyTime, AnotherTableIsRefused) {
  EXPECT_FALSE(parse_busy_time("", 100));
  EXPECT_FALSE(parse_busy_time("cpu 1 2 3\n", 100));
  EXPECT_FALSE(parse_busy_time("intr 1 2 3 4 5 6 7\n", 100));
}

TEST(BusyTime, OfThisMachineGrowsWhileThisProcessWorks) {
  const auto before = machine_busy_time();
  ASSERT_TRUE(before) << before.error().message;
  keep_busy(milliseconds(100));
  EXPECT_GT(machine_busy_time().value(), before.value());
}

TEST(EnergyMeter, PartOfAProcessThatWorksIsSomeOfTheMachinesEnergy) {
  PowercapFolder folder;
  folder.add("intel-rapl:0", "package-0", kRange, 0);
  auto meter = EnergyMeter::open(folder.path()).value();
  const Instant now = clock_now();
  meter.tick(now);
  keep_busy(milliseconds(200));
  folder.set("intel-rapl:0", 1'000'000);
  meter.tick(now + milliseconds(999));
  EXPECT_EQ(meter.process_uj().value(), 0u) << "it was read before it was due";
  meter.tick(now + seconds(1));
  EXPECT_GT(meter.process_uj().value(), 0u);
  EXPECT_LE(meter.process_uj().value(), 1'000'000u);
}

TEST(EnergyMeter, WhatIsNotKnownOnceIsNeverKnownAgain) {
  PowercapFolder folder;
  folder.add("intel-rapl:0", "package-0", kRange, 0);
  auto meter = EnergyMeter::open(folder.path()).value();
  folder.remove("intel-rapl:0", "energy_uj");
  const Instant now = clock_now();
  meter.tick(now);
  EXPECT_FALSE(meter.process_uj());
  folder.set("intel-rapl:0", 5);
  meter.tick(now + seconds(2));
  EXPECT_FALSE(meter.process_uj());
}

TEST(EnergyMeter, MachineThatDoesNotTellHasNone) {
  PowercapFolder folder;
  EXPECT_FALSE(EnergyMeter::open(folder.path()));
}

}  // namespace
}  // namespace penstock::server
