// SPDX-License-Identifier: Apache-2.0
#include "pool_client/kind_comparison.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "hostile_pool.h"

namespace penstock::pool_client {
namespace {

constexpr Numerics kOneKind{1, 1}, kOtherKind{1, 2};
constexpr wire::BatchKey kBatch{.epoch = 1, .sequence = 4};
constexpr wire::BatchKey kAgain = wire::recall_of(kBatch);

bool is_open(uint64_t) { return true; }

class KindComparisonTest : public testing::Test {
 protected:
  KindComparisonTest() {
    kinds_.note(1, kOneKind);
    kinds_.note(2, kOneKind);
    kinds_.note(3, kOtherKind);
  }
  std::optional<std::string> compare(uint64_t answerer, const ContentDigest::Value& first,
                                     const ContentDigest::Value& second) {
    kinds_.begin(kAgain, 1, "one", first);
    EXPECT_TRUE(kinds_.awaits(kAgain));
    return kinds_.finish(answerer, "three", second);
  }

  KindComparison kinds_;
};

TEST_F(KindComparisonTest, WorkerOfAnotherKindIsChosenWhileItIsOpen) {
  EXPECT_EQ(kinds_.choose(1, is_open), 3u);
  EXPECT_EQ(kinds_.choose(3, is_open), 1u);
  EXPECT_EQ(kinds_.choose(1, [](uint64_t id) { return id != 3; }), std::nullopt);
  kinds_.forget(3);
  EXPECT_EQ(kinds_.choose(1, is_open), std::nullopt);
}

TEST_F(KindComparisonTest, KindsAreComparedOnce) {
  EXPECT_EQ(compare(3, {1}, {1}), std::nullopt);
  EXPECT_EQ(kinds_.choose(1, is_open), std::nullopt);
  EXPECT_EQ(kinds_.choose(3, is_open), std::nullopt);
}

TEST_F(KindComparisonTest, DifferenceNamesBothWorkersTheBatchAndTheKernels) {
  const auto news = compare(3, {1}, {2});
  ASSERT_TRUE(news);
  EXPECT_NE(news->find("workers one and three made batch 4 of epoch 1 with different values"), std::string::npos)
      << *news;
  EXPECT_NE(news->find("complex numbers"), std::string::npos) << *news;
}

TEST_F(KindComparisonTest, AnswerOfTheSameKindDecidesNothing) {
  EXPECT_EQ(compare(2, {1}, {2}), std::nullopt);
  EXPECT_EQ(kinds_.choose(1, is_open), 3u);
}

TEST_F(KindComparisonTest, OneBatchIsComparedAtATime) {
  kinds_.begin(kAgain, 1, "one", {1});
  EXPECT_EQ(kinds_.choose(2, is_open), std::nullopt);
  kinds_.give_up();
  EXPECT_FALSE(kinds_.awaits(kAgain));
  EXPECT_EQ(kinds_.choose(2, is_open), 3u);
}

TEST_F(KindComparisonTest, FewKindsAreCompared) {
  for (uint64_t kind = 0; kind < kKindPairsMax; ++kind) {
    kinds_.note(3, {9, kind});
    compare(3, {1}, {1});
  }
  kinds_.note(3, kOtherKind);
  EXPECT_EQ(kinds_.choose(1, is_open), std::nullopt);
}

// ---- A live pool

HandWorker::Options worker_of(uint64_t worker_id, const Numerics& numerics, uint64_t first) {
  HandWorker::Options options;
  options.worker_id = worker_id;
  options.numerics = numerics;
  options.make = [first](uint64_t sequence) {
    return count_up(HostilePool::kBatchBytes, wire::number_of({.sequence = sequence}) + first);
  };
  return options;
}

TEST(KindComparison, BatchesOfTwoKindsOfWorkersThatDifferAreTold) {
  HostilePool pool;
  pool.add(worker_of(5, {1}, 0));
  pool.add(worker_of(6, {2}, 1));
  pool.begin();
  EXPECT_TRUE(pool.is_told("with different values"));
  EXPECT_EQ(pool.news_of(50).find("with different values"), std::string::npos) << "it is told once";
}

TEST(KindComparison, BatchesOfTwoKindsOfWorkersThatAgreeAreNotTold) {
  HostilePool pool;
  pool.add(worker_of(5, {1}, 0));
  pool.add(worker_of(6, {2}, 0));
  pool.begin();
  EXPECT_EQ(pool.news_of(50).find("with different values"), std::string::npos);
}

}  // namespace
}  // namespace penstock::pool_client
