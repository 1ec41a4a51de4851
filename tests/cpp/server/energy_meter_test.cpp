// SPDX-License-Identifier: Apache-2.0
#include "server/energy_meter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "base/clock.h"
#include "powercap_folder.h"
#include "server/maker.h"

namespace penstock::server {
namespace {

constexpr uint64_t kPowercapRange = 262'143'328'850;

class PowercapTest : public testing::Test {
 protected:
  // What a machine with two processors has.
  void make_machine() {
    folder_.add_folder("intel-rapl");  // the control type
    folder_.add("intel-rapl:0", "package-0", kPowercapRange, 1000);
    folder_.add("intel-rapl:0:0", "core", kPowercapRange, 400);
    folder_.add("intel-rapl:0:1", "dram", 65'712'999'613, 50);
    folder_.add("intel-rapl:1", "package-1", kPowercapRange, 5000);
    folder_.add("intel-rapl:2", "psys", kPowercapRange, 9000);
    folder_.add("intel-rapl-mmio:0", "package-0", kPowercapRange, 1000);
  }
  std::string refusal() const {
    const auto opened = Powercap::open(folder_.path());
    EXPECT_FALSE(opened);
    if (opened) return {};
    EXPECT_EQ(opened.error().code, Errc::kUnsupported);
    return opened.error().message;
  }

  PowercapFolder folder_;
};

TEST_F(PowercapTest, SumsProcessorsAndTheirMemoryAndNothingTwice) {
  make_machine();
  auto powercap = Powercap::open(folder_.path()).value();
  EXPECT_EQ(powercap.read().value(), 0u);
  folder_.set("intel-rapl:0", 1100);
  folder_.set("intel-rapl:0:0", 480);
  folder_.set("intel-rapl:0:1", 57);
  folder_.set("intel-rapl:1", 5010);
  folder_.set("intel-rapl:2", 9900);
  folder_.set("intel-rapl-mmio:0", 1100);
  EXPECT_EQ(powercap.read().value(), 117u);
  folder_.set("intel-rapl:1", 5011);
  EXPECT_EQ(powercap.read().value(), 118u);
}

TEST_F(PowercapTest, CounterThatWrapsAroundGoesOn) {
  folder_.add("intel-rapl:0", "package-0", 1000, 990);
  auto powercap = Powercap::open(folder_.path()).value();
  folder_.set("intel-rapl:0", 5);
  EXPECT_EQ(powercap.read().value(), 15u);
  folder_.set("intel-rapl:0", 700);
  EXPECT_EQ(powercap.read().value(), 710u);
  folder_.set("intel-rapl:0", 100);
  EXPECT_EQ(powercap.read().value(), 1110u);
}

TEST_F(PowercapTest, MachineWithoutCountersSaysSo) {
  EXPECT_NE(refusal().find("has no intel-rapl zone of a package"), std::string::npos);
  const auto missing = Powercap::open(folder_.path() + "/missing");
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message.find("missing: No such file or directory"), std::string::npos);
}

TEST_F(PowercapTest, OneCounterThatCannotBeReadMakesTheSumUnknown) {
  make_machine();
  folder_.remove("intel-rapl:0:1", "energy_uj");
  EXPECT_NE(refusal().find("intel-rapl:0:1/energy_uj cannot be read"), std::string::npos) << refusal();
}

TEST_F(PowercapTest, CounterThatCanNoLongerBeReadIsAnError) {
  make_machine();
  auto powercap = Powercap::open(folder_.path()).value();
  folder_.remove("intel-rapl:1", "energy_uj");
  EXPECT_FALSE(powercap.read());
}

TEST_F(PowercapTest, CounterThatIsNoNumberIsAnErrorThatShowsIt) {
  folder_.add("intel-rapl:0", "package-0", kPowercapRange, 1);
  folder_.write("intel-rapl:0", "energy_uj", "12 J\n");
  EXPECT_NE(refusal().find("is \"12 J\", but must be a number"), std::string::npos) << refusal();
}

TEST_F(PowercapTest, CounterThatGoesBackFromAboveItsRangeIsAnError) {
  folder_.add("intel-rapl:0", "package-0", 1000, 5000);
  auto powercap = Powercap::open(folder_.path()).value();
  folder_.set("intel-rapl:0", 3);
  EXPECT_FALSE(powercap.read());
}

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
