// SPDX-License-Identifier: Apache-2.0
#include "costs/cost_meter.h"

#include <gtest/gtest.h>

#include "session/worker_session.h"

namespace penstock::costs {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using wire::kUnknownEnergy;

class CostMeterTest : public testing::Test {
 protected:
  void welcome(uint64_t worker_id, wire::WorkerMeter meter, bool is_continued = false) {
    meter_.welcomed(worker_id, meter, is_continued, now_);
  }
  void hear(uint64_t worker_id, Duration after, wire::WorkerMeter meter) {
    now_ += after;
    meter_.heard(worker_id, meter, now_);
  }
  void part(uint64_t worker_id, Duration after) {
    now_ += after;
    meter_.parted(worker_id, now_);
  }
  const wire::JobCosts& totals() const { return meter_.totals(); }
  static uint64_t ns(Duration time) { return static_cast<uint64_t>(time.count()); }

  Instant now_{};
  CostMeter meter_;
};

TEST_F(CostMeterTest, WhatAWorkerSpentBeforeItsWelcomeIsNotCounted) {
  welcome(1, {.cpu_ns = 1000, .energy_uj = 500});
  EXPECT_EQ(totals(), (wire::JobCosts{.tenancy_count = 1, .metered_tenancy_count = 1}));
  hear(1, seconds(2), {.cpu_ns = 1700, .energy_uj = 650});
  part(1, milliseconds(300));
  EXPECT_EQ(totals(), (wire::JobCosts{.served_ns = ns(milliseconds(2300)),
                                      .cpu_ns = 700,
                                      .energy_uj = 150,
                                      .tenancy_count = 1,
                                      .metered_tenancy_count = 1}));
}

TEST_F(CostMeterTest, MessagesOfWorkersThatDoNotServeAreNoCost) {
  hear(1, seconds(2), {.cpu_ns = 1700});
  part(1, seconds(2));
  EXPECT_EQ(totals(), wire::JobCosts{});
}

TEST_F(CostMeterTest, NewLinkOfAServiceThatContinuesCountsTheTimeBetween) {
  welcome(1, {.cpu_ns = 10});
  now_ += seconds(1);
  welcome(1, {.cpu_ns = 30}, /*is_continued=*/true);
  EXPECT_EQ(totals().tenancy_count, 1u);
  EXPECT_EQ(totals().cpu_ns, 20u);
  EXPECT_EQ(totals().served_ns, ns(seconds(1)));
}

TEST_F(CostMeterTest, WorkerThatServedOthersInBetweenBeginsAnotherTenancy) {
  welcome(1, {.cpu_ns = 10});
  now_ += seconds(9);
  welcome(1, {.cpu_ns = 5000});
  EXPECT_EQ(totals().tenancy_count, 2u);
  EXPECT_EQ(totals().cpu_ns, 0u);
  EXPECT_EQ(totals().served_ns, 0u);
}

TEST_F(CostMeterTest, WorkerThatDiedServedUntilItsLeaseRanOut) {
  welcome(1, {});
  part(1, seconds(60));
  EXPECT_EQ(totals().served_ns, ns(session::kLease));
}

TEST_F(CostMeterTest, TenancyOfWhichSomeEnergyIsNotKnownIsNotMetered) {
  welcome(1, {.energy_uj = 0});
  welcome(2, {.energy_uj = kUnknownEnergy});
  EXPECT_EQ(totals().tenancy_count, 2u);
  EXPECT_EQ(totals().metered_tenancy_count, 1u);
  hear(1, seconds(1), {.energy_uj = 70});
  hear(1, seconds(1), {.energy_uj = kUnknownEnergy});
  EXPECT_EQ(totals().metered_tenancy_count, 0u);
  hear(1, seconds(1), {.energy_uj = 500});
  EXPECT_EQ(totals().metered_tenancy_count, 0u);
  EXPECT_EQ(totals().energy_uj, 70u);
}

TEST_F(CostMeterTest, MeterThatGoesBackAddsNothing) {
  welcome(1, {.cpu_ns = 1000, .energy_uj = 100});
  hear(1, seconds(1), {.cpu_ns = 10, .energy_uj = 1});
  EXPECT_EQ(totals().cpu_ns, 0u);
  EXPECT_EQ(totals().energy_uj, 0u);
  hear(1, seconds(1), {.cpu_ns = 15, .energy_uj = 3});
  EXPECT_EQ(totals().cpu_ns, 5u);
  EXPECT_EQ(totals().energy_uj, 2u);
}

TEST_F(CostMeterTest, BatchesAreCountedWithTheirSamplesAndBytes) {
  meter_.came({.sample_count = 64, .bytes = 1000});
  meter_.came({.sample_count = 7, .bytes = 100});
  EXPECT_EQ(totals(), (wire::JobCosts{.batch_count = 2, .sample_count = 71, .batch_bytes = 1100}));
}

// One message made a job's bill overflow.
TEST_F(CostMeterTest, WorkerThatClaimsMoreThanAMachineCanSpendCostsNoMore) {
  welcome(1, {.cpu_ns = 0, .energy_uj = 0});
  for (int count = 0; count < 3; ++count) {
    hear(1, seconds(1), {.cpu_ns = ~uint64_t{0}, .energy_uj = kUnknownEnergy - 1});
    hear(1, seconds(1), {.cpu_ns = 0, .energy_uj = 0});
  }
  EXPECT_LE(totals().cpu_ns, ns(seconds(70)) * 4096);
  EXPECT_LE(totals().energy_uj, uint64_t{70} * 100'000 * 1'000'000);
  EXPECT_EQ(totals().served_ns, ns(seconds(6)));
}

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
