// SPDX-License-Identifier: Apache-2.0
#include "session/enrolment.h"

#include <gtest/gtest.h>

namespace penstock::session {
namespace {

class WorkerEnrolmentTest : public testing::Test {
 protected:
  WorkerEnrolmentTest() { session_.assign(0, /*is_to_part=*/false); }

  void orders(uint64_t trainer_id, uint64_t view, bool is_settled = true, uint64_t controller_id = 5) {
    enrolment_.receive({.incarnation = 1,
                        .controller_id = controller_id,
                        .view = view,
                        .is_settled = is_settled,
                        .trainer_id = trainer_id},
                       session_, now_);
  }
  // Whether the worker begins for this trainer, which leaves it again.
  bool serves(uint64_t trainer_id) {
    session_.receive({.kind = wire::ToWorker::Kind::kHello, .trainer_id = trainer_id, .link = ++link_, .stamp = 1},
                     now_);
    const bool is_served = session_.trainer_id() == trainer_id;
    session_.abandon();
    return is_served;
  }

  Instant now_{};
  WorkerSession session_;
  WorkerEnrolment enrolment_{1, now_};
  uint32_t link_ = 0;
};

TEST_F(WorkerEnrolmentTest, OlderOrdersOfAControllerDoNotCount) {
  EXPECT_FALSE(serves(7));
  orders(7, 2);
  EXPECT_TRUE(serves(7));
  orders(8, 1);
  EXPECT_TRUE(serves(7));
  EXPECT_FALSE(serves(8));
  orders(8, 1, true, /*controller_id=*/6);
  EXPECT_TRUE(serves(8)) << "another controller counts anew";
}

TEST_F(WorkerEnrolmentTest, ControllerThatHasJustStartedLeavesItAsItIs) {
  orders(7, 2);
  orders(0, 1, /*is_settled=*/false, /*controller_id=*/6);
  EXPECT_TRUE(serves(7));
  orders(8, 1, true, 6);
  EXPECT_FALSE(serves(7));
}

// It knows some of the workers, so its shares would be too large.
TEST_F(WorkerEnrolmentTest, KeptBytesOfAControllerThatHasJustStartedDoNotCount) {
  EXPECT_EQ(enrolment_.keep_bytes(), 0);
  wire::WorkerOrders orders{.incarnation = 1, .controller_id = 5, .view = 1, .is_settled = true, .keep_bytes = 300};
  enrolment_.receive(orders, session_, now_);
  EXPECT_EQ(enrolment_.keep_bytes(), 300);
  orders.controller_id = 6;
  orders.is_settled = false;
  orders.keep_bytes = 900;
  enrolment_.receive(orders, session_, now_);
  EXPECT_EQ(enrolment_.keep_bytes(), 300);
  orders.is_settled = true;
  orders.keep_bytes = 0;
  enrolment_.receive(orders, session_, now_);
  EXPECT_EQ(enrolment_.keep_bytes(), 0);
}

TEST_F(WorkerEnrolmentTest, OrdersOfAControllerThatIsGoneLapse) {
  orders(7, 1);
  now_ += kOrdersValidity - std::chrono::milliseconds(1);
  enrolment_.tick(session_, now_);
  EXPECT_TRUE(serves(7));
  EXPECT_FALSE(serves(8));
  now_ += std::chrono::milliseconds(1);
  enrolment_.tick(session_, now_);
  EXPECT_TRUE(serves(8));
  orders(7, 1);
  EXPECT_FALSE(serves(8)) << "it is there again";
}

using std::chrono::seconds;

class NewcomersTest : public testing::Test {
 protected:
  int come(const std::string& key_name, int count) {
    int taken_count = 0;
    for (int index = 0; index < count; ++index) taken_count += newcomers_.take(key_name, now_) ? 1 : 0;
    return taken_count;
  }

  Instant now_{};
  Newcomers newcomers_;
};

TEST_F(NewcomersTest, ManyMayComeAtOnceAndThenSoManyASecond) {
  constexpr int kMany = 2 * static_cast<int>(kNewcomersAtOnce);
  EXPECT_EQ(come("the user mallory", kMany), static_cast<int>(kNewcomersAtOnce));
  for (int second = 0; second < 5; ++second) {
    now_ += seconds(1);
    EXPECT_EQ(come("the user mallory", kMany), static_cast<int>(kNewcomersPerSecond));
  }
  now_ += seconds(3600);
  EXPECT_EQ(come("the user mallory", kMany), static_cast<int>(kNewcomersAtOnce)) << "no more are saved up";
}

TEST_F(NewcomersTest, KeysDoNotTakeEachOthersTurns) {
  come("the user mallory", 5000);
  EXPECT_EQ(come("the role trainer", 3), 3);
}

}  // namespace
}  // namespace penstock::session
