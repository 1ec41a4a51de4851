// SPDX-License-Identifier: Apache-2.0
#include "costs/energy_share.h"

#include <gtest/gtest.h>

namespace penstock::costs {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class EnergyShareTest : public testing::Test {
 protected:
  struct Stretch {
    uint64_t machine_uj = 0;
    Duration busy{};
    Duration cpu{};
  };
  void pass(const Stretch& stretch) {
    reading_.machine_uj += stretch.machine_uj;
    reading_.machine_busy += stretch.busy;
    reading_.process_cpu += stretch.cpu;
    share_.note(reading_);
  }

  EnergyReading reading_{.machine_uj = 1'000'000, .machine_busy = seconds(100), .process_cpu = seconds(5)};
  EnergyShare share_;
};

TEST_F(EnergyShareTest, WhatWasBeforeTheFirstReadingIsNotThisProcesss) {
  pass({});
  EXPECT_EQ(share_.process_uj(), 0u);
}

TEST_F(EnergyShareTest, EnergyIsSharedOutByBusyCpuTime) {
  pass({});
  pass({.machine_uj = 40'000, .busy = seconds(4), .cpu = seconds(1)});
  EXPECT_EQ(share_.process_uj(), 10'000u);
  pass({.machine_uj = 40'000, .busy = seconds(1), .cpu = milliseconds(500)});
  EXPECT_EQ(share_.process_uj(), 30'000u);
}

TEST_F(EnergyShareTest, ProcessThatSleepsUsesNothing) {
  pass({});
  pass({.machine_uj = 40'000, .busy = seconds(1)});
  EXPECT_EQ(share_.process_uj(), 0u);
}

// The machine counts busy time in hundredths of a second, and a process in nanoseconds.
TEST_F(EnergyShareTest, ShareIsNeverAboveTheWhole) {
  pass({});
  pass({.machine_uj = 40'000, .busy = milliseconds(10), .cpu = milliseconds(13)});
  EXPECT_EQ(share_.process_uj(), 40'000u);
}

TEST_F(EnergyShareTest, StretchGoesOnUntilTheMachinesClockMoves) {
  pass({});
  pass({.machine_uj = 10'000, .cpu = milliseconds(4)});
  EXPECT_EQ(share_.process_uj(), 0u);
  pass({.machine_uj = 30'000, .busy = milliseconds(20), .cpu = milliseconds(1)});
  EXPECT_EQ(share_.process_uj(), 10'000u);
}

}  // namespace
}  // namespace penstock::costs
