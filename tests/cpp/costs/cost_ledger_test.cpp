// SPDX-License-Identifier: Apache-2.0
#include "costs/cost_ledger.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "session/worker_session.h"

namespace penstock::costs {
namespace {

using std::chrono::seconds;

class CostLedgerTest : public testing::Test {
 protected:
  void report(uint64_t trainer_id, uint64_t cpu_ns, const std::string& job = "train.py: Images",
              const std::string& about = "node7, process 3") {
    ledger_.reported({.trainer_id = trainer_id, .job = job, .costs = {.cpu_ns = cpu_ns}, .about = about}, now_);
  }
  std::vector<CostLedger::Job> jobs() const { return ledger_.jobs(now_); }

  Instant now_{};
  CostLedger ledger_;
};

TEST_F(CostLedgerTest, ReportsAreTotalsAndNotSums) {
  report(1, 10);
  report(1, 30);
  ASSERT_EQ(jobs().size(), 1u);
  EXPECT_EQ(jobs()[0].costs.cpu_ns, 30u);
  EXPECT_TRUE(jobs()[0].is_running);
}

TEST_F(CostLedgerTest, ClientsOfOneProgramAreOneJob) {
  report(1, 10);
  ledger_.left(1);
  report(2, 5);
  ASSERT_EQ(jobs().size(), 1u);
  EXPECT_EQ(jobs()[0].costs.cpu_ns, 15u);
}

TEST_F(CostLedgerTest, JobsOfAnotherNameOrProcessAreOthers) {
  report(1, 10);
  report(2, 20, "eval.py: Images");
  report(3, 30, "train.py: Images", "node8, process 3");
  EXPECT_EQ(jobs().size(), 3u);
}

TEST_F(CostLedgerTest, CostsOfAJobThatHasEndedAreKept) {
  report(1, 10);
  ledger_.left(1);
  now_ += seconds(3600);
  ASSERT_EQ(jobs().size(), 1u);
  EXPECT_EQ(jobs()[0].costs.cpu_ns, 10u);
  EXPECT_FALSE(jobs()[0].is_running);
  EXPECT_EQ(jobs()[0].since_report, seconds(3600));
}

TEST_F(CostLedgerTest, TrainerThatLostItsLeaseAndComesBackIsNotCountedTwice) {
  report(1, 10);
  now_ += 2 * session::kLease;
  EXPECT_FALSE(jobs()[0].is_running);
  report(1, 12);
  EXPECT_TRUE(jobs()[0].is_running);
  EXPECT_EQ(jobs()[0].costs.cpu_ns, 12u);
}

TEST_F(CostLedgerTest, LeavingOfATrainerThatIsNotKnownDoesNothing) {
  ledger_.left(1);
  EXPECT_TRUE(jobs().empty());
}

TEST_F(CostLedgerTest, JobOfWhichNothingWasHeardForLongestIsForgottenAndCounted) {
  for (uint64_t id = 1; id <= kLedgerJobCountMax + 1; ++id) {
    now_ += seconds(1);
    report(id, id, "job " + std::to_string(id));
  }
  EXPECT_EQ(jobs().size(), kLedgerJobCountMax);
  EXPECT_EQ(jobs().front().name, "job " + std::to_string(kLedgerJobCountMax + 1));
  EXPECT_EQ(jobs().back().name, "job 2");
  EXPECT_EQ(ledger_.forgotten_count(), 1u);
  ledger_.left(1);
  report(1, 1, "job 1");
  EXPECT_EQ(jobs().size(), kLedgerJobCountMax);
}

// Five thousand made-up trainers had the costs of all real jobs forgotten.
TEST_F(CostLedgerTest, UserWithMostJobsLosesTheOneThatHasCostLeast) {
  const auto report_of = [this](uint64_t id, const std::string& user, uint64_t served_ns) {
    ledger_.reported({.trainer_id = id, .job = "job " + std::to_string(id), .costs = {.served_ns = served_ns}}, now_,
                     user);
  };
  report_of(1, "ben", 1);
  report_of(2, "", 2);
  for (uint64_t id = 3; id < 5000; ++id) report_of(id, "mallory", id == 50 ? 9 : 1000 + id);
  ASSERT_EQ(jobs().size(), kLedgerJobCountMax);
  uint64_t own_count = 0;
  for (const auto& job : jobs()) {
    if (job.user != "mallory") ++own_count;
    EXPECT_NE(job.name, "job 50") << "the cheapest of the user with most";
  }
  EXPECT_EQ(own_count, 2u);
}

TEST_F(CostLedgerTest, JobsOfTwoUsersAreTwo) {
  for (const auto& [id, user] : {std::pair<uint64_t, const char*>(1, "ann"), {2, "ben"}})
    ledger_.reported({.trainer_id = id, .job = "train.py", .costs = {.cpu_ns = id}, .about = "node7"}, now_, user);
  EXPECT_EQ(jobs().size(), 2u);
}

TEST_F(CostLedgerTest, ClientsThatVanishAreKeptInTheSum) {
  for (uint64_t id = 1; id <= kLedgerTrainerCountMax + 5; ++id) {
    now_ += seconds(1);
    report(id, 1);
  }
  ASSERT_EQ(jobs().size(), 1u);
  EXPECT_EQ(jobs()[0].costs.cpu_ns, kLedgerTrainerCountMax + 5);
}

TEST_F(CostLedgerTest, GpuThatTwoClientsShareIsCountedOnce) {
  const auto report_gpu = [this](uint64_t trainer_id, wire::GpuMeter gpu) {
    ledger_.reported({.trainer_id = trainer_id, .job = "train.py: Images", .gpu = gpu, .about = "node7"}, now_);
    return jobs()[0].gpu;
  };
  report_gpu(1, {.begin_uj = 100, .now_uj = 150});
  EXPECT_EQ(report_gpu(2, {.begin_uj = 140, .now_uj = 160}), (wire::GpuMeter{.begin_uj = 100, .now_uj = 160}));
  ledger_.left(1);
  EXPECT_EQ(report_gpu(2, {.begin_uj = 140, .now_uj = 190}), (wire::GpuMeter{.begin_uj = 100, .now_uj = 190}));
  EXPECT_FALSE(report_gpu(3, {}).has_energy()) << "one of them does not know it";
}

TEST_F(CostLedgerTest, SumsSaturate) {
  report(1, ~uint64_t{0});
  report(2, 5);
  EXPECT_EQ(jobs()[0].costs.cpu_ns, ~uint64_t{0});
}

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
