// SPDX-License-Identifier: Apache-2.0
#include "scheduling/roster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "session/worker_session.h"
#include "wire/control_record.h"

namespace penstock::scheduling {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class RecentRatesTest : public testing::Test {
 protected:
  // A report `after` the last one.
  void note(Duration after, uint64_t delivered_batches, Duration waited = {}) {
    now_ += after;
    rates_.note({.waited_ns = static_cast<uint64_t>(waited.count()), .delivered_batches = delivered_batches}, now_);
  }

  Instant now_{};
  RecentRates rates_;
};

TEST_F(RecentRatesTest, NothingIsKnownBeforeASecondOfReports) {
  EXPECT_EQ(rates_.batches_per_s(), std::nullopt);
  note({}, 0);
  EXPECT_EQ(rates_.batches_per_s(), std::nullopt);
  note(milliseconds(999), 50);
  EXPECT_EQ(rates_.batches_per_s(), std::nullopt);
  EXPECT_EQ(rates_.waited_share(), std::nullopt);
}

TEST_F(RecentRatesTest, RatesAreThoseOfTheTimeBetweenReports) {
  note({}, 100, seconds(7));
  for (int half = 1; half <= 4; ++half) note(milliseconds(500), 100 + 10 * half, seconds(7) + milliseconds(125) * half);
  EXPECT_DOUBLE_EQ(rates_.batches_per_s().value(), 20.0);
  EXPECT_DOUBLE_EQ(rates_.waited_share().value(), 0.25);
}

TEST_F(RecentRatesTest, WhatWasBeforeTheWindowIsForgotten) {
  note({}, 0);
  for (int second = 1; second <= 5; ++second) note(seconds(1), 1000 * second);
  for (int second = 1; second <= 11; ++second) note(seconds(1), 5000);
  EXPECT_DOUBLE_EQ(rates_.batches_per_s().value(), 0.0);
}

TEST_F(RecentRatesTest, ATrainerThatCountsAnewHasNoRateOfBefore) {
  note({}, 1000, seconds(9));
  note(seconds(5), 2000, seconds(9));
  note(milliseconds(500), 3);
  EXPECT_EQ(rates_.batches_per_s(), std::nullopt);
  note(seconds(2), 7);
  EXPECT_DOUBLE_EQ(rates_.batches_per_s().value(), 2.0);
}

TEST_F(RecentRatesTest, ReportsWithoutPauseGiveTheSameRate) {
  note({}, 0);
  for (uint64_t count = 1; count <= 200'000; ++count) note(std::chrono::microseconds(100), count);
  EXPECT_NEAR(rates_.batches_per_s().value(), 10'000.0, 1.0);
}

TEST_F(RecentRatesTest, NobodyWaitsForMoreThanAllTheTime) {
  note({}, 0);
  note(seconds(1), 0, seconds(3));
  EXPECT_DOUBLE_EQ(rates_.waited_share().value(), 1.0);
}

class RosterTest : public testing::Test {
 protected:
  wire::WorkerOrders worker(uint64_t id, uint64_t serves = 0, uint32_t incarnation = 1, bool is_draining = false) {
    return roster_.worker_reported({.worker_id = id,
                                    .incarnation = incarnation,
                                    .endpoint = "tcp://10.0.0.1:" + std::to_string(id),
                                    .is_draining = is_draining,
                                    .trainer_id = serves},
                                   now_);
  }
  void declining_worker(uint64_t id, std::vector<uint64_t> declined) {
    roster_.worker_reported({.worker_id = id,
                             .incarnation = 1,
                             .endpoint = "tcp://10.0.0.1:1",
                             .declined = std::move(declined),
                             .decline_reason = "reason of " + std::to_string(id)},
                            now_);
  }
  std::set<uint64_t> trainer(uint64_t id) {
    last_ = roster_.trainer_reported({.trainer_id = id, .job = "job", .worker_count_max = 64}, now_);
    std::set<uint64_t> workers;
    for (const auto& entry : last_.entries)
      if (!entry.worker.is_withdrawn) workers.insert(entry.worker.worker_id);
    return workers;
  }
  void settle() {
    now_ += kSettling;
    roster_.tick(now_);
  }
  void pass(Duration time) {
    now_ += time;
    roster_.tick(now_);
  }

  Instant now_{};
  Roster roster_{5, now_};
  wire::TrainerRoster last_;
};

TEST_F(RosterTest, TrainerThatWantsNoWorkersIsIdleSinceItWantedSome) {
  const auto report = [this](uint32_t worker_count_max) {
    roster_.trainer_reported({.trainer_id = 100, .job = "job", .worker_count_max = worker_count_max}, now_);
    return roster_.trainers(now_).at(0).idle;
  };
  EXPECT_EQ(report(64), Duration{});
  now_ += milliseconds(500);
  EXPECT_EQ(report(64), Duration{});
  now_ += milliseconds(500);
  EXPECT_EQ(report(0), milliseconds(500));
  now_ += milliseconds(500);
  EXPECT_EQ(report(0), seconds(1));
  now_ += milliseconds(500);
  EXPECT_EQ(report(64), Duration{});
}

TEST_F(RosterTest, EventsTellWhoJoinsAndWhoLeavesWithTheReason) {
  const auto events = [this] {
    std::vector<std::string> lines;
    for (const MemberEvent& event : roster_.take_events()) {
      const std::string who = (event.is_worker ? "worker " : "trainer ") + std::to_string(event.id);
      lines.push_back((event.is_failure ? "! " : "") + who + (event.has_joined ? " joined: " : " left: ") + event.text);
    }
    return lines;
  };
  using Lines = std::vector<std::string>;
  roster_.worker_reported({.worker_id = 1, .incarnation = 1, .about = "node1"}, now_);
  roster_.trainer_reported({.trainer_id = 100, .job = "train.py", .about = "node2"}, now_, "ann");
  EXPECT_EQ(events(), (Lines{"worker 1 joined: node1", "trainer 100 joined: train.py of the user ann; node2"}));
  worker(1);
  EXPECT_EQ(events(), Lines{});  // only changes are reported
  worker(1, 0, 2);
  EXPECT_EQ(events(), (Lines{"worker 1 left: it has lost its connection, and continues as its next incarnation",
                             "worker 1 joined: "}));
  worker(2);
  worker(3);
  worker(4, 0, 1, true);
  events();
  roster_.drain(2, now_);
  for (const uint64_t id : {2, 3, 4}) roster_.worker_left(id, now_);
  EXPECT_EQ(events(), (Lines{"worker 2 left: it was drained on request", "worker 3 left: it ended",
                             "worker 4 left: it was drained"}));
  roster_.trainer_reported({.trainer_id = 100, .job = "train.py", .queue = {.delivered_batches = 7}}, now_);
  roster_.trainer_left(100, now_);
  EXPECT_EQ(events(), (Lines{"trainer 100 left: it ended, after 7 batches"}));
  trainer(101);
  events();
  pass(session::kLease);
  EXPECT_EQ(events(), (Lines{"! worker 1 left: no report for 1500 ms",
                             "! trainer 101 left: no report for 1500 ms, after 0 batches"}));
}

TEST_F(RosterTest, EventsThatNobodyTakesAreBounded) {
  for (uint64_t id = 1; id <= kMemberEventsMax + 10; ++id) {
    worker(id);
    if (id > 8) roster_.worker_left(id - 8, now_);
  }
  EXPECT_EQ(roster_.take_events().size(), kMemberEventsMax);
}

TEST_F(RosterTest, SettlesBeforeItAssigns) {
  worker(1);
  EXPECT_TRUE(trainer(100).empty());
  EXPECT_FALSE(last_.is_settled);
  now_ += kSettling - milliseconds(1);
  worker(1);
  EXPECT_TRUE(trainer(100).empty());
  now_ += milliseconds(1);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1}));
  EXPECT_TRUE(last_.is_settled);
  EXPECT_EQ(last_.entries.front().endpoint, "tcp://10.0.0.1:1");
}

TEST_F(RosterTest, TrainersAreToldTheKeyOfTheConnectionThatAWorkerReportsOver) {
  const auto report = [this](const WorkerHolder& holder) {
    roster_.worker_reported({.worker_id = 1, .incarnation = 1, .endpoint = "tcp://10.0.0.1:1"}, now_, holder);
  };
  settle();
  report({.key = {std::byte{7}}, .machine = "beta"});
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1}));
  EXPECT_EQ(last_.entries.front().key, (wire::PublicKeyBytes{std::byte{7}}));
  EXPECT_EQ(roster_.workers(now_).at(0).machine, "beta");
  EXPECT_TRUE(roster_.changed_trainers().empty());
  report({.key = {std::byte{8}}});
  EXPECT_EQ(roster_.changed_trainers(), (std::vector<uint64_t>{100})) << "its trainer connects to another";
  EXPECT_EQ(roster_.roster_of(100).entries.front().key, (wire::PublicKeyBytes{std::byte{8}}));
  EXPECT_EQ(roster_.workers(now_).at(0).machine, "");
}

TEST_F(RosterTest, AdoptsWhoWorksForWhomAfterARestart) {
  for (uint64_t id = 1; id <= 4; ++id) worker(id, /*serves=*/id % 2 == 0 ? 100 : 200);
  trainer(100);
  trainer(200);
  now_ += session::kLease - milliseconds(1);
  for (uint64_t id = 1; id <= 4; ++id) worker(id, /*serves=*/id % 2 == 0 ? 100 : 200);
  trainer(100);
  trainer(200);
  now_ += milliseconds(600);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{2, 4}));
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{1, 3}));
}

TEST_F(RosterTest, WorkersMoveOnlyOnceTheyAreReleased) {
  settle();
  for (uint64_t id = 1; id <= 4; ++id) worker(id);
  EXPECT_EQ(trainer(100).size(), 4u);
  EXPECT_TRUE(trainer(200).empty());
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1, 2}));  // the last ones that came are withdrawn
  worker(3, /*serves=*/100);
  EXPECT_TRUE(trainer(200).empty());
  worker(3);
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{3}));
  EXPECT_EQ(roster_.changed_trainers(), (std::vector<uint64_t>{100}));
}

TEST_F(RosterTest, WorkerThatLosesItsLeaseIsFenced) {
  settle();
  worker(1);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1}));
  now_ += milliseconds(600);
  trainer(100);
  now_ += session::kLease - milliseconds(600);
  trainer(100);
  pass({});
  EXPECT_TRUE(trainer(100).empty());
  EXPECT_TRUE(worker(1, 100).is_fenced);
  EXPECT_TRUE(trainer(100).empty());
  EXPECT_FALSE(worker(1, 0, /*incarnation=*/2).is_fenced);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1}));
  EXPECT_TRUE(worker(1, 0, /*incarnation=*/1).is_fenced);  // a report that was long under way
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1}));
}

TEST_F(RosterTest, TrainerThatDiesFreesItsWorkersWithinALease) {
  settle();
  worker(1);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1}));
  now_ += session::kLease - milliseconds(1);
  worker(1, 100);
  EXPECT_TRUE(trainer(200).empty());
  now_ += milliseconds(1);
  roster_.tick(now_);
  worker(1, 0);  // it has seen the same silence
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{1}));
}

TEST_F(RosterTest, WorkerThatIsFoundWithATrainerThatWantsNoneIsTakenFromIt) {
  const auto report_idle = [&] {
    roster_.trainer_reported({.trainer_id = 100, .job = "job", .worker_count_max = 0}, now_);
  };
  settle();
  worker(1);
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{1}));
  report_idle();
  now_ += milliseconds(500);
  worker(1, /*serves=*/100);  // though it is 200's
  report_idle();
  pass(session::kLease - milliseconds(500));  // 200 is gone
  report_idle();
  worker(1, /*serves=*/100);
  ASSERT_EQ(roster_.workers(now_).size(), 1u);
  EXPECT_EQ(roster_.workers(now_).front().assigned_to, 100u);
  EXPECT_TRUE(roster_.workers(now_).front().is_withdrawn);
}

TEST_F(RosterTest, DrainedWorkerIsWithdrawnAndToldSo) {
  settle();
  worker(1);
  worker(2);
  EXPECT_EQ(trainer(100).size(), 2u);
  EXPECT_FALSE(roster_.drain(3, now_));
  EXPECT_TRUE(roster_.drain(1, now_));
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{2}));
  EXPECT_TRUE(worker(1, 100).is_to_drain);
  worker(1, 0, 1, /*is_draining=*/true);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{2}));
  EXPECT_EQ(last_.entries.size(), 1u);
  roster_.worker_left(1, now_);
  EXPECT_EQ(roster_.workers(now_).size(), 1u);
  EXPECT_FALSE(worker(1).is_fenced);
}

// The dataset of a job hung, the job had ended, and the status called its worker free: the next job was given it, and
// never had a batch.
TEST_F(RosterTest, StuckWorkerGoesToNobodyUntilItIsOfUseAgain) {
  const auto stuck_worker = [this](uint64_t serves) {
    roster_.worker_reported(
        {.worker_id = 1, .incarnation = 1, .endpoint = "tcp://10.0.0.1:1", .trainer_id = serves, .stuck_ms = 2500},
        now_);
  };
  settle();
  worker(1);
  worker(2);
  EXPECT_EQ(trainer(100).size(), 2u);
  stuck_worker(/*serves=*/100);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{2}));
  stuck_worker(/*serves=*/0);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{2}));
  EXPECT_EQ(last_.entries.size(), 1u);
  EXPECT_EQ(last_.pool_count, 2u);
  worker(1);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1, 2}));
}

// The job counted as one that is served, and took the worker of another one.
TEST_F(RosterTest, JobWhoseWorkerIsStuckTakesNoneFromAnotherThatIsServed) {
  settle();
  worker(1);
  worker(2);
  EXPECT_EQ(trainer(100).size(), 2u);
  trainer(200);
  worker(2);
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{2}));
  roster_.worker_reported(
      {.worker_id = 1, .incarnation = 1, .endpoint = "tcp://10.0.0.1:1", .trainer_id = 100, .stuck_ms = 2500}, now_);
  EXPECT_TRUE(trainer(100).empty());
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{2}));
}

TEST_F(RosterTest, WorkerThatDeclinedATrainerGoesToAnother) {
  settle();
  worker(1);
  worker(2);
  EXPECT_EQ(trainer(100).size(), 2u);
  declining_worker(2, {100});
  EXPECT_EQ(roster_.changed_trainers(), (std::vector<uint64_t>{100}));
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1}));
  EXPECT_EQ(last_.entries.size(), 1u);
  EXPECT_EQ(last_.pool_count, 2u);
  EXPECT_EQ(last_.declined_count, 1u);
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{2}));
  EXPECT_EQ(last_.declined_count, 0u);
}

TEST_F(RosterTest, TrainerKnowsWhenNobodyCanRunItsJob) {
  settle();
  worker(1);
  worker(2);
  EXPECT_EQ(trainer(100).size(), 2u);
  declining_worker(1, {100});
  declining_worker(2, {50, 100});
  EXPECT_TRUE(trainer(100).empty());
  EXPECT_EQ(last_.pool_count, 2u);
  EXPECT_EQ(last_.declined_count, 2u);
  roster_.drain(1, now_);  // one that leaves is none that could have run it
  trainer(100);
  EXPECT_EQ(last_.pool_count, 1u);
  EXPECT_EQ(last_.declined_count, 1u);
  worker(3);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{3}));
  EXPECT_EQ(last_.pool_count, 2u);
}

// A worker's report has its reason for the last trainer alone.
TEST_F(RosterTest, TrainerIsToldWhyWorkersDeclinedItWhereThatIsKnown) {
  settle();
  trainer(100);
  declining_worker(1, {100});
  declining_worker(2, {50, 100});
  declining_worker(3, {100, 50});
  trainer(100);
  EXPECT_EQ(last_.declined_count, 3u);
  EXPECT_EQ(last_.declines, (std::vector<wire::TrainerRoster::Decline>{{1, "reason of 1"}, {2, "reason of 2"}}));
  trainer(50);
  EXPECT_EQ(last_.declines, (std::vector<wire::TrainerRoster::Decline>{{3, "reason of 3"}}));
  for (uint64_t id = 4; id < 4 + wire::kRosterDeclineCountMax; ++id) declining_worker(id, {100});
  trainer(100);
  EXPECT_EQ(last_.declines.size(), wire::kRosterDeclineCountMax);
}

TEST_F(RosterTest, WorkersGoToTrainersWhoseJobsTheyCanRun) {
  using wire::JobKind;
  settle();
  const auto worker_of = [&](uint64_t id, JobKind kind, uint16_t torch) {
    roster_.worker_reported({.worker_id = id, .incarnation = 1, .job_kinds = wire::kind_bit(kind), .torch = torch},
                            now_);
  };
  const auto trainer_of = [&](uint64_t id, JobKind kind, uint16_t torch) {
    last_ = roster_.trainer_reported(
        {.trainer_id = id, .job = "job", .worker_count_max = 64, .job_kind = kind, .torch = torch}, now_);
    std::set<uint64_t> workers;
    for (const auto& entry : last_.entries) workers.insert(entry.worker.worker_id);
    return workers;
  };
  const uint16_t torch = wire::torch_number(2, 11);
  worker_of(1, JobKind::kPython, torch);
  worker_of(2, JobKind::kPlugin, torch);
  worker_of(3, JobKind::kPlugin, wire::torch_number(2, 12));
  worker_of(4, JobKind::kPlugin, 0);  // it does not tell
  EXPECT_EQ(trainer_of(100, JobKind::kPlugin, torch), (std::set<uint64_t>{2, 4}));
  EXPECT_EQ(last_.declined_count, 2u);
  EXPECT_TRUE(last_.declines.empty());  // which is no news while others can run it
  EXPECT_EQ(trainer_of(200, JobKind::kPython, torch), (std::set<uint64_t>{1}));
  EXPECT_EQ(last_.declined_count, 3u);
  for (const uint64_t id : {2, 4}) roster_.worker_left(id, now_);
  trainer_of(100, JobKind::kPlugin, torch);
  EXPECT_EQ(last_.declines,
            (std::vector<wire::TrainerRoster::Decline>{
                {1, "it runs Python, but the dataset is a plug-in; start penstock-worker for it"},
                {3, "it has torch 2.12, but the job uses torch 2.11; install the same version on both"}}));
}

// A validation loader is made anew for each validation. Each of them counted for kFirstDemand, so that a pool that
// grows kept four workers for a training that needs one.
TEST_F(RosterTest, AnotherLoaderOfAMeasuredProgramCountsForNoMoreThanTheFirst) {
  settle();
  worker(1);
  wire::TrainerReport training{
      .trainer_id = 100, .job = "train.py: Images", .worker_count_max = 64, .about = "host, process 7, torch 2.15"};
  wire::TrainerReport validation = training;
  validation.trainer_id = 101;
  roster_.trainer_reported(training, now_);
  EXPECT_EQ(roster_.wanted_worker_count(), kFirstDemand);
  for (uint64_t batches = 0; batches < 100; ++batches) {
    now_ += milliseconds(200);
    worker(1, 100);
    training.queue = {.delivered_batches = batches,
                      .step_count = batches,
                      .stepping_ns = batches * 200'000'000,
                      .made_batches = batches,
                      .made_ns = batches * 51'000'000};
    roster_.trainer_reported(training, now_);
  }
  EXPECT_EQ(roster_.wanted_worker_count(), 1U);
  training.worker_count_max = 0;
  roster_.trainer_reported(training, now_);
  EXPECT_EQ(roster_.wanted_worker_count(), 0U);
  roster_.trainer_reported(validation, now_);
  EXPECT_EQ(roster_.wanted_worker_count(), 1U);
  EXPECT_EQ(roster_.trainers(now_).at(1).demand, 1U);
  for (uint64_t batches = 0; batches < 40; ++batches) {  // it does nothing but wait, 4 s in all
    now_ += milliseconds(100);
    worker(1, 101);
    roster_.trainer_reported(training, now_);
    validation.queue = {.delivered_batches = batches,
                        .step_count = batches,
                        .starved_ns = batches * 100'000'000,
                        .made_batches = batches,
                        .made_ns = batches * 100'000'000};
    roster_.trainer_reported(validation, now_);
  }
  EXPECT_GT(roster_.trainers(now_).at(1).demand, 1U);
  EXPECT_EQ(roster_.wanted_worker_count(), 1U) << "nothing is started for a validation";
  validation.trainer_id = 102;
  validation.about = "host, process 8, torch 2.15";
  validation.queue = {};
  roster_.trainer_reported(validation, now_);
  EXPECT_EQ(roster_.wanted_worker_count(), 1U + kFirstDemand);
}

TEST_F(RosterTest, FencedIncarnationsAreRememberedUpToABound) {
  settle();
  for (uint64_t id = 1; id <= kFencedCountMax + 1; ++id) worker(id);
  pass(session::kLease);
  EXPECT_EQ(roster_.fenced_count(), kFencedCountMax + 1);
  EXPECT_FALSE(worker(1).is_fenced);
  EXPECT_TRUE(worker(kFencedCountMax + 1).is_fenced);
}

TEST_F(RosterTest, OrdersNameTheTrainerThatAWorkerIsGivenTo) {
  EXPECT_FALSE(worker(9).is_settled);
  settle();  // in which 9 is lost
  const auto free = worker(1);
  EXPECT_TRUE(free.is_settled);
  EXPECT_EQ(free.trainer_id, 0u);
  EXPECT_FALSE(free.is_to_part) << "one that it serves may be known to no controller yet";
  trainer(100);
  const auto given = roster_.take_orders();
  ASSERT_EQ(given.size(), 1u);
  EXPECT_EQ(given.at(1).trainer_id, 100u);
  EXPECT_TRUE(given.at(1).is_to_part) << "from any other";
  EXPECT_GT(given.at(1).view, free.view);
  EXPECT_TRUE(roster_.take_orders().empty());
  EXPECT_EQ(worker(1, 100), given.at(1));
  roster_.trainer_left(100, now_);
  EXPECT_EQ(roster_.take_orders().at(1).trainer_id, 0u);
}

// A trainer that was to leave a worker kept it for as long as it liked.
TEST_F(RosterTest, TrainerThatDoesNotLeaveAWithdrawnWorkerIsPartedFromIt) {
  settle();
  worker(1);
  worker(2);
  EXPECT_EQ(trainer(100).size(), 2u);
  trainer(200);
  wire::WorkerOrders orders;
  const auto stay_for = [&](Duration time) {
    for (Duration passed{}; passed < time; passed += milliseconds(500)) {
      pass(milliseconds(500));
      worker(1, 100);
      orders = worker(2, 100);
      trainer(100);
      EXPECT_TRUE(trainer(200).empty());
    }
  };
  stay_for(kLeaveTime - seconds(1));
  EXPECT_EQ(orders.trainer_id, 100u) << "it may have a batch that takes long";
  stay_for(seconds(2));
  EXPECT_EQ(orders.trainer_id, 0u);
  EXPECT_TRUE(orders.is_to_part);
  EXPECT_EQ(trainer(100), (std::set<uint64_t>{1}));
  EXPECT_EQ(worker(2).trainer_id, 200u);
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{2}));
}

TEST_F(RosterTest, WorkerOfATrainerThatDoesNotReportGoesToOthersOnceTheyHaveUseForIt) {
  settle();
  worker(1);
  trainer(100);
  wire::WorkerOrders orders;
  for (Duration passed{}; passed < kLeaveTime + session::kLease + seconds(1); passed += milliseconds(500)) {
    if (passed == seconds(10)) {
      EXPECT_TRUE(trainer(200).empty()) << "it may be cut off from the controller alone";
      roster_.trainer_left(200, now_);
    }
    pass(milliseconds(500));
    orders = worker(1, 100);
  }
  EXPECT_EQ(orders.trainer_id, 0u);
  EXPECT_FALSE(orders.is_to_part) << "nobody needs it";
  EXPECT_EQ(trainer(200), (std::set<uint64_t>{1}));
  EXPECT_TRUE(worker(1, 100).is_to_part);
}

TEST_F(RosterTest, UserWithMostTrainersMakesRoomForOthers) {
  const auto report = [this](uint64_t id, const std::string& user) {
    roster_.trainer_reported({.trainer_id = id, .job = "job", .worker_count_max = 1}, now_, user);
  };
  report(1, "ben");
  for (uint64_t id = 2; id <= kPoolCountMax; ++id) report(id, "mallory");
  worker(1, /*serves=*/kPoolCountMax);  // the last of hers
  EXPECT_FALSE(roster_.make_room_for_trainer("mallory", now_));
  EXPECT_TRUE(roster_.make_room_for_trainer("ann", now_));
  EXPECT_TRUE(roster_.has_trainer(1));
  EXPECT_TRUE(roster_.has_trainer(kPoolCountMax)) << "it has a worker";
  EXPECT_FALSE(roster_.has_trainer(kPoolCountMax - 1));
  report(kPoolCountMax + 1, "ann");
  EXPECT_TRUE(roster_.make_room_for_trainer("ben", now_));
  EXPECT_FALSE(roster_.has_trainer(kPoolCountMax - 2));
}

// Whoever had the key of one machine filled the pool with workers that were not there, and others' were refused.
TEST_F(RosterTest, MachineWithMostWorkersMakesRoomForOthers) {
  const auto report = [this](uint64_t id, const WorkerHolder& holder, uint64_t serves = 0) {
    roster_.worker_reported({.worker_id = id, .incarnation = 1, .trainer_id = serves}, now_, holder);
  };
  const WorkerHolder mallory{.machine = "mallory"};
  const WorkerHolder here{.address = "10.0.0.1"};  // with the key of the role
  const WorkerHolder there{.address = "10.0.0.2"};
  trainer(900);
  report(1, here);
  for (uint64_t id = 2; id < kPoolCountMax; ++id) report(id, mallory);
  report(kPoolCountMax, mallory, /*serves=*/900);
  EXPECT_FALSE(roster_.make_room_for_worker(mallory, now_));
  EXPECT_TRUE(roster_.make_room_for_worker(there, now_));
  EXPECT_TRUE(roster_.has_worker(1));
  EXPECT_TRUE(roster_.has_worker(kPoolCountMax)) << "it serves a trainer";
  EXPECT_FALSE(roster_.has_worker(kPoolCountMax - 1));
  report(kPoolCountMax + 1, there);
  EXPECT_TRUE(roster_.make_room_for_worker(here, now_));
  EXPECT_FALSE(roster_.has_worker(kPoolCountMax - 2));
}

TEST_F(RosterTest, WorkersWithTheKeyOfTheRoleShareThePoolByTheirAddresses) {
  const auto report = [this](uint64_t id, const std::string& address) {
    roster_.worker_reported({.worker_id = id, .incarnation = 1}, now_, {.address = address});
  };
  report(1, "10.0.0.1");
  for (uint64_t id = 2; id <= kPoolCountMax; ++id) report(id, "10.0.0.9");
  EXPECT_FALSE(roster_.make_room_for_worker({.address = "10.0.0.9"}, now_));
  EXPECT_TRUE(roster_.make_room_for_worker({.address = "10.0.0.2"}, now_));
  EXPECT_FALSE(roster_.has_worker(kPoolCountMax));
  EXPECT_TRUE(roster_.has_worker(1));
}

TEST_F(RosterTest, NewcomersLeaveAJobThatIsServedAWorker) {
  settle();
  worker(1);
  worker(2);
  EXPECT_EQ(trainer(900).size(), 2u);
  for (uint64_t id = 1; id <= 20; ++id)
    roster_.trainer_reported({.trainer_id = id, .job = "job", .worker_count_max = 1}, now_);
  EXPECT_EQ(trainer(900).size(), 1u);
}

// One key filled the rosters of all trainers, from which real workers then fell out.
TEST_F(RosterTest, PoolHasRoomForSoManyWorkersAndTrainersAndNoMore) {
  static_assert(kPoolCountMax <= wire::kRosterCountMax, "a roster has no room for all workers of a pool");
  for (uint64_t id = 1; id <= kPoolCountMax; ++id) {
    ASSERT_TRUE(roster_.make_room_for_worker({}, now_)) << id;
    worker(id);
  }
  EXPECT_FALSE(roster_.make_room_for_worker({}, now_));
  EXPECT_TRUE(roster_.make_room_for_trainer("", now_));
  roster_.worker_left(1, now_);
  EXPECT_TRUE(roster_.make_room_for_worker({}, now_));

  Roster other(6, now_);
  for (uint64_t id = 1; id <= kPoolCountMax; ++id) {
    ASSERT_TRUE(other.make_room_for_trainer("", now_)) << id;
    other.trainer_reported({.trainer_id = id, .job = "job"}, now_);
  }
  EXPECT_FALSE(other.make_room_for_trainer("", now_));
  EXPECT_TRUE(other.make_room_for_worker({}, now_));
  other.trainer_left(1, now_);
  EXPECT_TRUE(other.make_room_for_trainer("", now_));
}

// Reports of a trainer that is measured: of `step_s` and `worker_s` a batch, and with as many workers as it has.
class MeasuredTrainer {
 public:
  MeasuredTrainer(uint64_t id, std::string job, double step_s, double worker_s, std::string user = {})
      : step_s_(step_s),
        worker_s_(worker_s),
        user_(std::move(user)),
        report_{.trainer_id = id, .job = std::move(job), .worker_count_max = 64} {}

  void set_rank(wire::JobRank rank) { report_.job_rank = rank; }
  bool is_alone() const { return report_.job_rank.group == 0; }
  std::pair<std::string, uint64_t> job() const { return {user_, report_.job_rank.group}; }

  // Batches a second that its workers and its steps allow.
  double rate(Roster& roster) const {
    uint32_t worker_count = 0;
    for (const auto& entry : roster.roster_of(report_.trainer_id).entries)
      worker_count += entry.worker.is_withdrawn ? 0 : 1;
    return std::min(1 / step_s_, worker_count / worker_s_);
  }

  // A rank that is faster than its job waits for the others within its steps.
  void train(Roster& roster, Instant now, double seconds, double rate_of_job) {
    const double starved_share = rate_of_job < rate(roster) ? 0 : 1 - rate_of_job * step_s_;
    batches_ += rate_of_job * seconds;
    starved_s_ += seconds * starved_share;
    stepping_s_ += seconds * (1 - starved_share);
    wire::QueueSignal& queue = report_.queue;
    queue.delivered_batches = queue.made_batches = queue.step_count = static_cast<uint64_t>(batches_);
    queue.stepping_ns = static_cast<uint64_t>(stepping_s_ * 1e9);
    queue.starved_ns = static_cast<uint64_t>(starved_s_ * 1e9);
    queue.made_ns = static_cast<uint64_t>(batches_ * worker_s_ * 1e9);
    roster.trainer_reported(report_, now, user_);
  }

 private:
  double step_s_, worker_s_;
  double batches_ = 0, starved_s_ = 0, stepping_s_ = 0;
  std::string user_;
  wire::TrainerReport report_;
};

class SharedPool {
 public:
  explicit SharedPool(RosterOptions options, uint64_t worker_count)
      : roster_(1, Instant{}, std::move(options)), worker_count_(worker_count) {}

  void run(std::vector<MeasuredTrainer> trainers, Duration time) {
    constexpr Duration kStep = milliseconds(500);
    for (Duration passed{}; passed < time; passed += kStep) {
      now_ += kStep;
      std::map<std::pair<std::string, uint64_t>, double> rate_of_job;
      for (const MeasuredTrainer& trainer : trainers) {
        const double rate = trainer.rate(roster_);
        const auto [place, is_new] = rate_of_job.try_emplace(trainer.job(), rate);
        place->second = std::min(place->second, rate);
      }
      for (MeasuredTrainer& trainer : trainers) {
        const double rate = trainer.is_alone() ? trainer.rate(roster_) : rate_of_job[trainer.job()];
        trainer.train(roster_, now_, 0.5, rate);
      }
      std::map<uint64_t, uint64_t> works_for;
      for (const auto& worker : roster_.workers(now_))
        works_for[worker.report.worker_id] = worker.is_withdrawn ? 0 : worker.assigned_to;
      for (uint64_t id = 1; id <= worker_count_; ++id) {
        roster_.worker_reported(
            {.worker_id = id, .incarnation = 1, .endpoint = "tcp://h:1", .trainer_id = works_for[id]}, now_);
      }
      roster_.tick(now_);
    }
  }
  uint32_t count_of(uint64_t trainer_id) const {
    for (const auto& trainer : roster_.trainers(now_))
      if (trainer.report.trainer_id == trainer_id) return trainer.worker_count;
    return 0;
  }
  const Roster& roster() const { return roster_; }

 private:
  Roster roster_;
  uint64_t worker_count_;
  Instant now_{};
};

TEST(RosterShares, AJobHasAsManyWorkersAsItHasUseFor) {
  SharedPool pool({}, 60);
  pool.run({{100, "modest", 0.1, 0.2}, {200, "hungry", 0.05, 2}}, std::chrono::seconds(60));
  EXPECT_EQ(pool.count_of(100), 3u);
  EXPECT_GE(pool.count_of(200), 50u);
}

TEST(RosterShares, WorkersToSpareGoToWhomTheyHelpMore) {
  SharedPool pool({}, 20);
  pool.run({{100, "modest", 0.1, 0.2}, {200, "hungry", 0.05, 2}}, std::chrono::seconds(60));
  EXPECT_EQ(pool.count_of(100), 2u);
  EXPECT_EQ(pool.count_of(200), 18u);
}

TEST(RosterShares, EqualJobsShareEvenly) {
  SharedPool pool({}, 10);
  pool.run({{100, "a", 0.05, 2}, {200, "b", 0.05, 2}}, std::chrono::seconds(60));
  EXPECT_EQ(pool.count_of(100), 5u);
  EXPECT_EQ(pool.count_of(200), 5u);
}

std::vector<MeasuredTrainer> ranks_of(uint64_t group, std::vector<MeasuredTrainer> trainers) {
  for (uint32_t rank = 0; rank < trainers.size(); ++rank)
    trainers[rank].set_rank({.group = group, .rank = rank, .world_size = static_cast<uint32_t>(trainers.size())});
  return trainers;
}

TEST(RosterShares, OfAJobsWorkersMoreGoToTheRankThatWaitsMost) {
  SharedPool pool({}, 8);
  pool.run(ranks_of(7, {{100, "a", 0.05, 0.2}, {101, "a", 0.05, 0.6}}), std::chrono::seconds(60));
  EXPECT_EQ(pool.count_of(100), 2u);
  EXPECT_EQ(pool.count_of(101), 6u);
}

TEST(RosterShares, AJobOfRanksIsOneJobToTheOthers) {
  SharedPool pool({.policy = max_min}, 12);
  std::vector<MeasuredTrainer> trainers = ranks_of(7, {{100, "a", 0.05, 2}, {101, "a", 0.05, 2}, {102, "a", 0.05, 2}});
  trainers.push_back({200, "b", 0.05, 2});
  pool.run(std::move(trainers), std::chrono::seconds(60));
  for (const uint64_t rank : {100, 101, 102}) EXPECT_EQ(pool.count_of(rank), 2u);
  EXPECT_EQ(pool.count_of(200), 6u);
}

TEST(RosterShares, AnotherUserCannotJoinAJob) {
  SharedPool pool({.policy = max_min}, 12);
  pool.run(ranks_of(7, {{100, "a", 0.05, 2, "ann"}, {101, "a", 0.05, 2, "ann"}, {102, "a", 0.05, 2, "ben"}}),
           std::chrono::seconds(60));
  EXPECT_EQ(pool.count_of(102), 6u);
}

TEST(RosterShares, UsersShareEvenlyHoweverManyJobsTheyHave) {
  for (const AllocationPolicy policy : {gpu_progress, max_min}) {
    SharedPool pool({.policy = policy}, 8);
    std::vector<MeasuredTrainer> trainers{{900, "a", 0.05, 2, "ben"}};
    for (uint64_t id = 1; id <= 7; ++id) trainers.push_back({id, "b", 0.05, 2, "mallory"});
    pool.run(trainers, std::chrono::seconds(60));
    EXPECT_EQ(pool.count_of(900), 4u);
    EXPECT_EQ(pool.roster().policy_trouble(), "");
  }
}

TEST(RosterShares, PrioritiesAndQuotasAreKept) {
  SharedPool pool({.floor_share = 0.25, .terms = {{"a", {.priority = 3}}}}, 8);
  pool.run({{100, "a", 0.05, 2}, {200, "b", 0.05, 2}}, std::chrono::seconds(60));
  EXPECT_EQ(pool.count_of(100), 7u);
  EXPECT_EQ(pool.count_of(200), 1u);
  SharedPool bounded({.terms = {{"a", {.quota = 2}}}}, 8);
  bounded.run({{100, "a", 0.05, 2}, {200, "b", 0.05, 2}}, std::chrono::seconds(60));
  EXPECT_EQ(bounded.count_of(100), 2u);
  EXPECT_EQ(bounded.count_of(200), 6u);
}

TEST(RosterShares, UsersHavePrioritiesAndQuotasBesideTheirJobs) {
  SharedPool pool({.terms = {{"a", {.quota = 1}}}, .user_terms = {{"ann", {.quota = 3}}}}, 12);
  pool.run({{100, "a", 0.05, 2, "ann"}, {200, "b", 0.05, 2, "ann"}, {300, "a", 0.05, 2}, {400, "c", 0.05, 2, "ben"}},
           std::chrono::seconds(60));
  EXPECT_EQ(pool.count_of(100), 1u) << "the quota of the job";
  EXPECT_EQ(pool.count_of(200), 2u) << "what is left of the user's";
  EXPECT_EQ(pool.count_of(300), 1u) << "another job of that name";
  EXPECT_EQ(pool.count_of(400), 8u);
  SharedPool unequal({.floor_share = 0.25, .user_terms = {{"ben", {.priority = 3}}}}, 8);
  unequal.run({{100, "a", 0.05, 2, "ann"}, {200, "a", 0.05, 2, "ben"}}, std::chrono::seconds(60));
  EXPECT_EQ(unequal.count_of(100), 1u);
  EXPECT_EQ(unequal.count_of(200), 7u);
}

TEST(RosterKeep, BytesAreDividedAmongTheWorkers) {
  Roster roster(5, Instant{}, {.keep_bytes = 900});
  const auto share_of = [&](uint64_t id) {
    return roster.worker_reported({.worker_id = id, .incarnation = 1, .endpoint = "tcp://10.0.0.1:1"}, Instant{})
        .keep_bytes;
  };
  EXPECT_EQ(share_of(1), 900);
  EXPECT_EQ(share_of(2), 450);
  EXPECT_EQ(share_of(3), 300);
  EXPECT_EQ(share_of(1), 300) << "in answer to its next report";
  roster.worker_left(2, Instant{});
  EXPECT_EQ(share_of(1), 450);
}

std::vector<uint32_t> nonsense(std::span<const JobClaim> claims, uint32_t worker_count, const AllocationOptions&) {
  return std::vector<uint32_t>(claims.size(), worker_count + 1);
}
std::vector<uint32_t> throws(std::span<const JobClaim>, uint32_t, const AllocationOptions&) {
  throw std::runtime_error("out of order");
}

TEST(RosterShares, APolicyThatFailsIsDoneWithoutAndNamed) {
  for (const AllocationPolicy policy : {nonsense, throws}) {
    SharedPool pool({.policy = policy}, 6);
    pool.run({{100, "a", 0.05, 2}, {200, "b", 0.05, 2}}, std::chrono::seconds(10));
    EXPECT_EQ(pool.count_of(100), 3u);
    EXPECT_EQ(pool.count_of(200), 3u);
    EXPECT_NE(pool.roster().policy_trouble(), "");
  }
}

}  // namespace
}  // namespace penstock::scheduling
