// SPDX-License-Identifier: Apache-2.0
#include "loader/step_ledger.h"

#include <gtest/gtest.h>

namespace penstock::loader {
namespace {

using std::chrono::milliseconds;

Instant at(int64_t time_ms) { return Instant(milliseconds(time_ms)); }
uint64_t ns(int64_t time_ms) { return static_cast<uint64_t>(Duration(milliseconds(time_ms)).count()); }

uint64_t total_ns(const wire::StepTotals& t) {
  return t.compute_ns + t.dataset_ns + t.collate_ns + t.prefix_ns + t.worker_ns + t.wire_ns + t.device_ns + t.order_ns +
         t.ranks_ns + t.loader_ns;
}

class Ledger : public ::testing::Test {
 protected:
  // Made from 10 to 40 ms (dataset to 25, collate to 32, prefix to 40), here at 50 and staged at 55.
  static StepLedger::Delivery delivery() {
    return {.epoch = 1,
            .sequence = 3,
            .times = {.worker_id = 7, .made_at = at(40), .arrived_at = at(50), .staged_at = at(55)},
            .making = {.dataset = milliseconds(15), .collate = milliseconds(7), .prefix = milliseconds(8)},
            .bytes = 100};
  }
  // A step whose program asks at `entered`, waits from `begin` to `end` and has the batch at `left`.
  void step(int64_t entered, int64_t begin, int64_t end, int64_t left, const StepLedger::Delivery& delivery) {
    ledger.enter(at(entered));
    ledger.note_wait(at(begin), at(end));
    ledger.deliver(delivery);
    ledger.leave(at(left));
  }
  wire::StepTotals totals() const { return StepLedger::totals(counters); }

  LoaderCounters counters;
  StepLedger ledger{counters};
};

TEST_F(Ledger, AWaitForAWholeBatchIsSharedOutByWhenItWasWhere) {
  ledger.begin_epoch(at(0));
  step(2, 4, 57, 60, delivery());
  const auto t = totals();
  EXPECT_EQ(t.step_count, 1u);
  EXPECT_EQ(t.compute_ns, ns(2));
  EXPECT_EQ(t.worker_ns, ns(6));
  EXPECT_EQ(t.dataset_ns, ns(15));
  EXPECT_EQ(t.collate_ns, ns(7));
  EXPECT_EQ(t.prefix_ns, ns(8));
  EXPECT_EQ(t.wire_ns, ns(10));
  EXPECT_EQ(t.device_ns, ns(5));
  EXPECT_EQ(t.order_ns, 0u);
  EXPECT_EQ(t.loader_ns, ns(2 + 2 + 3));  // before the wait, waking up, and after it
  EXPECT_EQ(total_ns(t), ns(60));
}

TEST_F(Ledger, AWaitThatBeginsLateIsForWhatWasLeft) {
  ledger.begin_epoch(at(0));
  step(30, 30, 52, 52, delivery());
  const auto t = totals();
  EXPECT_EQ(t.compute_ns, ns(30));
  EXPECT_EQ(t.dataset_ns, 0u);
  EXPECT_EQ(t.collate_ns, ns(2));
  EXPECT_EQ(t.prefix_ns, ns(8));
  EXPECT_EQ(t.wire_ns, ns(10));
  EXPECT_EQ(t.device_ns, ns(2));
  EXPECT_EQ(total_ns(t), ns(52));
}

TEST_F(Ledger, FromWhenALaterBatchIsHereTheWaitIsForTheOrder) {
  ledger.begin_epoch(at(0));
  auto late = delivery();
  late.later_ready_at = at(20);
  step(0, 0, 55, 55, late);
  const auto t = totals();
  EXPECT_EQ(t.worker_ns, ns(10));
  EXPECT_EQ(t.dataset_ns, ns(10));
  EXPECT_EQ(t.collate_ns, 0u);
  EXPECT_EQ(t.order_ns, ns(35));
  EXPECT_EQ(total_ns(t), ns(55));
}

TEST_F(Ledger, ABatchThatWasHereIsNoWait) {
  ledger.begin_epoch(at(0));
  ledger.enter(at(100));
  ledger.deliver(delivery());
  ledger.leave(at(101));
  const auto t = totals();
  EXPECT_EQ(t.compute_ns, ns(100));
  EXPECT_EQ(t.loader_ns, ns(1));
  EXPECT_EQ(total_ns(t), ns(101));
}

TEST_F(Ledger, ManyShortWaitsWithPausesBetweenThemAreOne) {
  ledger.begin_epoch(at(0));
  ledger.enter(at(0));
  for (int slice = 0; slice < 5; ++slice)
    ledger.note_wait(at(10 * slice), at(10 * slice + 10) - std::chrono::microseconds(slice == 4 ? 0 : 100));
  ledger.deliver(delivery());
  ledger.leave(at(50));
  EXPECT_EQ(total_ns(totals()), ns(50));
  EXPECT_EQ(totals().loader_ns, 0u);
}

TEST_F(Ledger, AWaitThatNoBatchEndsIsForAWorker) {
  ledger.begin_epoch(at(0));
  ledger.enter(at(0));
  ledger.note_wait(at(1), at(9));
  ledger.leave(at(10));
  EXPECT_EQ(totals().worker_ns, ns(8));
  EXPECT_EQ(totals().loader_ns, ns(2));
  EXPECT_EQ(totals().step_count, 0u);
}

TEST_F(Ledger, WaitingForOtherRanksCountsApartFromWaitingForABatch) {
  ledger.begin_epoch(at(0));
  ledger.enter(at(0));
  ledger.begin_ranks(at(0));
  ledger.note_wait(at(5), at(20));  // for a batch
  ledger.end_ranks(at(60));
  ledger.deliver(delivery());
  ledger.leave(at(61));
  const auto t = totals();
  EXPECT_EQ(t.ranks_ns, ns(45));
  EXPECT_EQ(t.worker_ns + t.dataset_ns, ns(15));
  EXPECT_EQ(t.loader_ns, ns(1));
  EXPECT_EQ(total_ns(t), ns(61));
}

TEST_F(Ledger, TimeBetweenEpochsIsNobodys) {
  ledger.begin_epoch(at(0));
  step(0, 0, 55, 55, delivery());
  ledger.begin_epoch(at(1000));
  ledger.enter(at(1001));
  ledger.deliver(delivery());
  ledger.leave(at(1001));
  EXPECT_EQ(total_ns(totals()), ns(56));
}

TEST_F(Ledger, WorkersAreToldApartAndForgottenWithTheLoader) {
  ledger.begin_epoch(at(0));
  step(0, 0, 55, 55, delivery());
  auto other = delivery();
  other.times.worker_id = 8;
  step(60, 60, 61, 62, other);
  const auto workers = ledger.workers();
  ASSERT_EQ(workers.size(), 2u);
  EXPECT_EQ(workers.at(7).batch_count, 1u);
  EXPECT_EQ(workers.at(7).waited, Duration(milliseconds(55)));
  EXPECT_EQ(workers.at(8).making.dataset, Duration(milliseconds(15)));
  ledger.begin_stream();
  EXPECT_TRUE(ledger.workers().empty());
}

TEST_F(Ledger, TheSlowestSamplesAreKeptSlowestFirst) {
  for (int64_t time_ms = 1; time_ms <= 20; ++time_ms) {
    if (ledger.is_slow(milliseconds(time_ms))) ledger.note_slow_sample({.time = milliseconds(time_ms)});
  }
  const auto samples = ledger.slow_samples();
  ASSERT_EQ(samples.size(), kSlowSampleCountMax);
  EXPECT_EQ(samples.front().time, Duration(milliseconds(20)));
  EXPECT_EQ(samples.back().time, Duration(milliseconds(13)));
  EXPECT_FALSE(ledger.is_slow(milliseconds(13)));
  EXPECT_FALSE(ledger.is_slow(milliseconds(0)));
}

TEST_F(Ledger, RecordsAreKeptUpToTheNumberAskedFor) {
  ledger.record(1);
  ledger.begin_epoch(at(0));
  step(0, 0, 55, 56, delivery());
  step(60, 60, 61, 62, delivery());
  const auto records = ledger.take_records();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].entered_at, at(0));
  EXPECT_EQ(records[0].given_at, at(56));
  EXPECT_EQ(records[0].bytes, 100u);
}

// A worker whose clock was years behind had the batch on the wire for as long.
TEST_F(Ledger, WhatAWorkerSaysOfItsTimesStaysWithinWhatTheTrainerSaw) {
  ledger.begin_epoch(at(0));
  auto said = delivery();
  said.times.asked_at = at(5);
  said.times.made_at = at(-1'000'000'000);
  said.making = {.dataset = milliseconds(429'000), .collate = milliseconds(429'000), .prefix = milliseconds(429'000)};
  step(2, 4, 57, 60, said);
  const auto t = totals();
  EXPECT_EQ(total_ns(t), ns(60));
  EXPECT_EQ(counters.wire_ns.value(), ns(45));
  EXPECT_EQ(counters.dataset_ns.value(), ns(45));
  EXPECT_EQ(counters.collate_ns.value(), 0u);
}

}  // namespace
}  // namespace penstock::loader
