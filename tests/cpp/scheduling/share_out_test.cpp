// SPDX-License-Identifier: Apache-2.0
#include "scheduling/share_out.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace penstock::scheduling {
namespace {

constexpr uint64_t kA = 100;
constexpr uint64_t kB = 200;
constexpr uint64_t kC = 300;

std::vector<Demand> demands_of(std::vector<uint64_t> trainers, uint32_t worker_count_max = 64) {
  std::vector<Demand> demands;
  for (const uint64_t id : trainers) demands.push_back({.trainer_id = id, .worker_count_max = worker_count_max});
  return demands;
}

// A pool whose moves are made at once, or as slowly as in life.
class ShareOutTest : public testing::Test {
 protected:
  struct Worker {
    uint64_t trainer_id = 0;
    bool is_moving = false;
    uint64_t order = 0;
    std::vector<uint64_t> declined;
  };

  void join(std::vector<uint64_t> declined = {}) { workers_.push_back({.declined = std::move(declined)}); }
  // The number of moves.
  size_t share(std::span<const Demand> demands) {
    std::vector<AssignedWorker> hands;
    for (const Worker& worker : workers_) {
      const auto state = worker.is_moving         ? AssignedWorker::State::kMoving
                         : worker.trainer_id != 0 ? AssignedWorker::State::kHeld
                                                  : AssignedWorker::State::kFree;
      hands.push_back({state, worker.trainer_id, worker.order, worker.declined});
    }
    const auto moves = share_out(demands, hands);
    for (const Move& move : moves) {
      Worker& worker = workers_[move.hand];
      EXPECT_FALSE(worker.is_moving);
      EXPECT_EQ(worker.trainer_id == 0, move.trainer_id != 0) << "only what is free is given";
      worker.is_moving = move.trainer_id == 0;
      worker.trainer_id = move.trainer_id;
      worker.order = ++order_;
    }
    return moves.size();
  }
  void arrive() {
    for (Worker& worker : workers_) worker.is_moving = false;
  }
  void settle(std::span<const Demand> demands) {
    for (int round = 0; share(demands) > 0; ++round) {
      ASSERT_LT(round, 20) << "workers are moved for ever";
      EXPECT_EQ(share(demands), 0u) << "nothing has happened since";
      arrive();
    }
  }
  size_t count_of(uint64_t trainer_id) const {
    return static_cast<size_t>(std::count_if(workers_.begin(), workers_.end(),
                                             [&](const Worker& worker) { return worker.trainer_id == trainer_id; }));
  }

  std::vector<size_t> counts() const { return {count_of(kA), count_of(kB), count_of(kC)}; }

  std::vector<Worker> workers_;
  uint64_t order_ = 0;
};

TEST_F(ShareOutTest, EverybodyGetsAsMuchAsAnyOtherUpToWhatItWants) {
  std::vector<Demand> demands = demands_of({kA, kB, kC});
  demands[0].worker_count_max = 2;
  for (int i = 0; i < 3; ++i) join();
  settle(demands);
  EXPECT_EQ(counts(), (std::vector<size_t>{1, 1, 1}));
  for (int i = 0; i < 7; ++i) join();
  settle(demands);
  EXPECT_EQ(counts(), (std::vector<size_t>{2, 4, 4}));
  settle(std::span(demands).first(1));
  EXPECT_EQ(counts(), (std::vector<size_t>{2, 0, 0}));
  settle({});
  EXPECT_EQ(counts(), (std::vector<size_t>{0, 0, 0}));
}

TEST_F(ShareOutTest, AnOddWorkerStaysWhereItIs) {
  for (int i = 0; i < 3; ++i) join();
  workers_[0].trainer_id = kA;
  workers_[1].trainer_id = workers_[2].trainer_id = kB;
  EXPECT_EQ(share(demands_of({kA, kB})), 0u);
  workers_[1].trainer_id = kA;
  EXPECT_EQ(share(demands_of({kA, kB})), 0u);
}

TEST_F(ShareOutTest, WhatWasGivenLastIsTakenFirst) {
  for (int i = 0; i < 4; ++i) join();
  settle(demands_of({kA}));
  workers_[1].order = 99;
  workers_[2].order = 98;
  settle(demands_of({kA, kB}));
  EXPECT_EQ(workers_[1].trainer_id, kB);
  EXPECT_EQ(workers_[2].trainer_id, kB);
}

TEST_F(ShareOutTest, WhatIsTakenIsCountedOnUntilItCanBeGiven) {
  for (int i = 0; i < 4; ++i) join();
  settle(demands_of({kA}));
  EXPECT_EQ(count_of(kA), 4u);
  const auto both = demands_of({kA, kB});
  EXPECT_EQ(share(both), 2u);
  EXPECT_EQ(share(both), 0u);
  arrive();
  EXPECT_EQ(share(both), 2u);
  EXPECT_EQ(count_of(kB), 2u);
}

TEST(ShareOut, StrayIsGivenOnlyWhereNoOtherIsToBeHad) {
  using State = AssignedWorker::State;
  const AssignedWorker hands[] = {{.state = State::kStray}, {.state = State::kMoving}, {.state = State::kFree}};
  EXPECT_EQ(share_out(demands_of({kA}, 1), hands), (std::vector<Move>{{.hand = 2, .trainer_id = kA}}));
  EXPECT_EQ(share_out(demands_of({kA}, 2), hands), (std::vector<Move>{{.hand = 2, .trainer_id = kA}}))
      << "the one that moves will come";
  EXPECT_EQ(share_out(demands_of({kA}, 3), hands),
            (std::vector<Move>{{.hand = 0, .trainer_id = kA}, {.hand = 2, .trainer_id = kA}}));
}

TEST_F(ShareOutTest, WhatATrainerDoesNotWantIsTakenThoughNobodyNeedsIt) {
  join();
  join();
  settle(demands_of({kA}));
  settle(demands_of({kA}, 1));
  EXPECT_EQ(count_of(kA), 1u);
  settle(demands_of({kA}, 0));
  EXPECT_EQ(count_of(kA), 0u);
}

TEST_F(ShareOutTest, WhatDeclinedATrainerIsTakenFromItAndNotGivenToItAgain) {
  join();
  join();
  settle(demands_of({kA}));
  workers_[0].declined = {kA};
  settle(demands_of({kA}));
  EXPECT_EQ(workers_[0].trainer_id, 0u);
  EXPECT_EQ(workers_[1].trainer_id, kA);
  settle(demands_of({kA, kB}));
  EXPECT_EQ(workers_[0].trainer_id, kB);
  EXPECT_EQ(workers_[1].trainer_id, kA);
}

TEST_F(ShareOutTest, TrainerGivesUpAWorkerForOneThatOthersCannotUse) {
  join();
  settle(demands_of({kB}));
  join({kA});
  settle(demands_of({kA, kB}));
  EXPECT_EQ(workers_[0].trainer_id, kA);
  EXPECT_EQ(workers_[1].trainer_id, kB);
}

TEST_F(ShareOutTest, WorkersAreGivenUpByWayOfAThird) {
  join({kC});
  join({kA});
  workers_[0].trainer_id = kA;  // which C cannot use
  workers_[1].trainer_id = kB;  // which C can, and B can use the third in its place
  join({kA, kC});
  settle(demands_of({kA, kB, kC}));
  EXPECT_EQ(workers_[0].trainer_id, kA);
  EXPECT_EQ(workers_[1].trainer_id, kC);
  EXPECT_EQ(workers_[2].trainer_id, kB);
}

TEST_F(ShareOutTest, WhatOthersCannotUseIsGivenBeyondAFairShareAndStays) {
  join();
  for (int i = 0; i < 3; ++i) join({kA, kC});
  const auto all = demands_of({kA, kB, kC});
  settle(all);
  EXPECT_EQ(counts(), (std::vector<size_t>{1, 3, 0}));
  join();
  settle(all);
  EXPECT_EQ(counts(), (std::vector<size_t>{1, 3, 1}));
}

TEST_F(ShareOutTest, WhateverIsDeclinedItComesToRestAndNobodyIsIdleWhoCouldWork) {
  std::mt19937 random(7);
  const auto below = [&](uint32_t end) { return std::uniform_int_distribution<uint32_t>(0, end - 1)(random); };
  for (int run = 0; run < 2000; ++run) {
    workers_.clear();
    std::vector<Demand> demands = demands_of({kA, kB, kC});
    for (Demand& demand : demands) demand.worker_count_max = below(6);
    const uint32_t declined_share = below(3);
    for (uint32_t i = 0, count = below(9); i < count; ++i) {
      join();
      for (const uint64_t trainer_id : {kA, kB, kC})
        if (below(4) < declined_share) workers_.back().declined.push_back(trainer_id);
      if (below(3) == 0) workers_.back().trainer_id = demands[below(3)].trainer_id;  // as a controller finds it
    }
    settle(demands);
    for (const Worker& worker : workers_) {
      const std::set<uint64_t> declined(worker.declined.begin(), worker.declined.end());
      EXPECT_FALSE(declined.contains(worker.trainer_id));
      for (const Demand& demand : demands) {
        EXPECT_LE(count_of(demand.trainer_id), demand.worker_count_max);
        if (declined.contains(demand.trainer_id) || count_of(demand.trainer_id) == demand.worker_count_max) continue;
        EXPECT_NE(worker.trainer_id, 0u) << "run " << run << ": one is idle that " << demand.trainer_id << " could use";
        // Nor has another two more.
        if (worker.trainer_id == 0) continue;
        EXPECT_LE(count_of(worker.trainer_id), count_of(demand.trainer_id) + 1) << "run " << run;
      }
    }
  }
}

// A rank that `busy` workers keep busy.
RankClaim rank_with(uint32_t has, double busy, uint32_t most = 64) {
  return {.worker_count = has, .worker_count_max = most, .progress = [busy](uint32_t count) {
            return std::min(1.0, count / busy);
          }};
}

uint32_t sum(const std::vector<uint32_t>& counts) { return std::accumulate(counts.begin(), counts.end(), 0U); }

double slowest(const std::vector<RankClaim>& ranks, const std::vector<uint32_t>& counts) {
  double slowest = 1;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].worker_count_max > 0) slowest = std::min(slowest, ranks[rank].progress(counts[rank]));
  return slowest;
}

// The best speed of the slowest rank, of all ways to give out `total`.
double best_slowest(const std::vector<RankClaim>& ranks, std::vector<uint32_t>& counts, uint32_t total, size_t rank) {
  if (rank == ranks.size()) return slowest(ranks, counts);
  double best = 0;
  for (counts[rank] = 0; counts[rank] <= std::min(total, ranks[rank].worker_count_max); ++counts[rank])
    best = std::max(best, best_slowest(ranks, counts, total - counts[rank], rank + 1));
  return best;
}

TEST(RankSplitTest, GivesMoreToTheRankThatWaitsMost) {
  const std::vector<RankClaim> ranks = {rank_with(0, 1), rank_with(0, 3), rank_with(0, 2)};
  EXPECT_EQ(split_among_ranks(ranks, 6), (std::vector<uint32_t>{1, 3, 2}));
}

TEST(RankSplitTest, GivesEveryRankOneBeforeAnyHasTwo) {
  const std::vector<RankClaim> ranks = {rank_with(0, 1), rank_with(0, 9), rank_with(0, 2)};
  EXPECT_EQ(split_among_ranks(ranks, 3), (std::vector<uint32_t>{1, 1, 1}));
}

TEST(RankSplitTest, LeavesWorkersWhereTheyAreForASmallGain) {
  const std::vector<RankClaim> ranks = {rank_with(3, 8.2), rank_with(4, 8)};
  EXPECT_EQ(split_among_ranks(ranks, 7), (std::vector<uint32_t>{3, 4}));
  const std::vector<RankClaim> level = {rank_with(2, 4), rank_with(4, 4.4)};
  EXPECT_EQ(split_among_ranks(level, 6), (std::vector<uint32_t>{3, 3}));
}

TEST(RankSplitTest, ARankWithoutUseForWorkersHoldsNothingUp) {
  const std::vector<RankClaim> ranks = {rank_with(2, 1, 0), rank_with(0, 4)};
  EXPECT_EQ(split_among_ranks(ranks, 4), (std::vector<uint32_t>{0, 4}));
  EXPECT_EQ(job_progress(ranks, 1000)[4], 1.0);
}

TEST(RankSplitTest, AJobWithOneRankHasTheProgressOfItsRank) {
  const std::vector<double> progress = job_progress(std::vector{rank_with(0, 4, 5)}, 1000);
  EXPECT_EQ(progress, (std::vector<double>{0, 0.25, 0.5, 0.75, 1, 1}));
  EXPECT_EQ(job_progress(std::vector{rank_with(0, 4, 5)}, 2), (std::vector<double>{0, 0.25, 0.5}));
}

TEST(RankSplitTest, NoOtherSplitHasAFasterSlowestRank) {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t end) { return static_cast<uint32_t>(random() % end); };
  for (int round = 0; round < 300; ++round) {
    std::vector<RankClaim> ranks;
    const uint32_t rank_count = 1 + below(4);
    for (uint32_t rank = 0; rank < rank_count; ++rank)
      ranks.push_back(rank_with(below(5), 0.5 + 0.1 * below(60), below(6)));
    const std::vector<double> progress = job_progress(ranks, 1000);
    const uint32_t use = static_cast<uint32_t>(progress.size()) - 1;
    const uint32_t total = below(use + 3);
    const std::vector<uint32_t> counts = split_among_ranks(ranks, total);
    EXPECT_EQ(sum(counts), std::min(total, use));
    std::vector<uint32_t> tried(ranks.size(), 0);
    const double best = best_slowest(ranks, tried, total, 0);
    EXPECT_DOUBLE_EQ(progress[std::min(total, use)], best);
    EXPECT_GE(slowest(ranks, counts) * kRankMoveGainMin * (1 + 1e-9), best) << "round " << round;
  }
}

}  // namespace
}  // namespace penstock::scheduling
