// SPDX-License-Identifier: Apache-2.0
#include "costs/bill.h"

#include <gtest/gtest.h>

namespace penstock::costs {
namespace {

// Two hours of workers, one of CPUs, 3.6 MJ = 1 kWh.
constexpr wire::JobCosts kCosts{.served_ns = 7'200'000'000'000,
                                .cpu_ns = 3'600'000'000'000,
                                .energy_uj = 3'600'000'000'000,
                                .tenancy_count = 2,
                                .metered_tenancy_count = 2,
                                .batch_count = 100,
                                .sample_count = 4000,
                                .batch_bytes = 8'000'000};
constexpr CostFactors kFactors{.price_per_hour = 0.5, .energy_price_per_kwh = 0.25, .gco2_per_kwh = 400};

TEST(Bill, IsInUnitsForPeople) {
  const Bill bill = bill_of(kCosts, kFactors);
  EXPECT_DOUBLE_EQ(bill.worker_hours, 2);
  EXPECT_DOUBLE_EQ(bill.cpu_hours, 1);
  EXPECT_DOUBLE_EQ(bill.bytes, 8e6);
  EXPECT_DOUBLE_EQ(bill.batches, 100);
  EXPECT_DOUBLE_EQ(bill.samples, 4000);
  EXPECT_DOUBLE_EQ(bill.energy_j.value(), 3.6e6);
  EXPECT_DOUBLE_EQ(bill.money.value(), 2 * 0.5 + 0.25);
  EXPECT_DOUBLE_EQ(bill.gco2.value(), 400);
}

TEST(Bill, WithoutFactorsMoneyAndCo2AreUnknown) {
  const Bill bill = bill_of(kCosts, {});
  EXPECT_EQ(bill.money, std::nullopt);
  EXPECT_EQ(bill.gco2, std::nullopt);
}

TEST(Bill, OneWorkerThatDoesNotKnowItsEnergyMakesTheSumUnknown) {
  wire::JobCosts costs = kCosts;
  costs.metered_tenancy_count = 1;
  const Bill bill = bill_of(costs, kFactors);
  EXPECT_EQ(bill.energy_j, std::nullopt);
  EXPECT_EQ(bill.gco2, std::nullopt);
  EXPECT_EQ(bill.money, std::nullopt) << "a part that has a price is not known";
  EXPECT_DOUBLE_EQ(bill_of(costs, {.price_per_hour = 0.5}).money.value(), 1);
}

TEST(Bill, EnergyAloneMayHaveAPrice) {
  EXPECT_DOUBLE_EQ(bill_of(kCosts, {.energy_price_per_kwh = 0.25}).money.value(), 0.25);
}

TEST(Bill, EnergyOfTheGpuStandsByItself) {
  const Bill bill = bill_of(kCosts, kFactors, {.begin_uj = 5'000'000, .now_uj = 9'000'000});
  EXPECT_DOUBLE_EQ(bill.gpu_energy_j.value(), 4);
  EXPECT_DOUBLE_EQ(per_thousand_samples(bill)->gpu_energy_j.value(), 1);
  EXPECT_EQ(bill.money, bill_of(kCosts, kFactors).money);
  EXPECT_EQ(bill_of(kCosts, kFactors).gpu_energy_j, std::nullopt);
}

TEST(Bill, CounterOfAGpuThatWentBackIsUnknown) {
  EXPECT_EQ(bill_of(kCosts, kFactors, {.begin_uj = 9, .now_uj = 5}).gpu_energy_j, std::nullopt);
}

TEST(Bill, PerThousandSamplesIsTheQuotient) {
  const Bill bill = per_thousand_samples(bill_of(kCosts, kFactors)).value();
  EXPECT_DOUBLE_EQ(bill.worker_hours, 0.5);
  EXPECT_DOUBLE_EQ(bill.cpu_hours, 0.25);
  EXPECT_DOUBLE_EQ(bill.bytes, 2e6);
  EXPECT_DOUBLE_EQ(bill.samples, 1000);
  EXPECT_DOUBLE_EQ(bill.energy_j.value(), 0.9e6);
  EXPECT_DOUBLE_EQ(bill.money.value(), 1.25 / 4);
  EXPECT_DOUBLE_EQ(bill.gco2.value(), 100);
}

TEST(Bill, WithoutSamplesThereIsNothingPerSample) {
  wire::JobCosts costs = kCosts;
  costs.sample_count = 0;
  EXPECT_FALSE(per_thousand_samples(bill_of(costs, kFactors)).has_value());
}

TEST(Bill, UnknownStaysUnknownPerSample) {
  const Bill bill = per_thousand_samples(bill_of(kCosts, {})).value();
  EXPECT_EQ(bill.money, std::nullopt);
  EXPECT_EQ(bill.gco2, std::nullopt);
}

}  // namespace
}  // namespace penstock::costs
