// SPDX-License-Identifier: Apache-2.0
// RequestOrder against torch's algorithm, said again here in the words of torch's multiprocessing iterator.
#include "session/request_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../base/seeded_test.h"
#include "base/result.h"

namespace penstock::session {
namespace {

// What torch does with an index queue per worker: a request goes round robin to a worker that still has data (and room,
// when the order is free); the next batch is the received index, or whatever arrives when the order is free.
class TorchOrder {
 public:
  TorchOrder(uint32_t worker_count, uint32_t prefetch_factor, bool in_order)
      : max_tasks_(worker_count * prefetch_factor),
        in_order_(in_order),
        status_(worker_count, true),
        worker_tasks_(worker_count, 0) {}

  // _try_put_index: the worker that gets the next index, if any does.
  std::optional<uint32_t> put_index() {
    for (size_t tried = 0; tried < status_.size(); ++tried) {
      const uint32_t worker = cycle_++ % static_cast<uint32_t>(status_.size());
      if (!status_[worker]) continue;
      uint32_t active_count = 0;
      for (const bool is_active : status_) active_count += is_active ? 1 : 0;
      if (!in_order_ && worker_tasks_[worker] >= max_tasks_ / active_count) continue;
      task_info_[send_index_] = {worker, false};
      ++worker_tasks_[worker];
      ++tasks_outstanding_;
      ++send_index_;
      return worker;
    }
    return std::nullopt;
  }

  // The loop at the head of _next_data: the received index moves past tasks that will never be answered. False at the
  // end.
  bool find_next() {
    while (received_index_ < send_index_) {
      const auto task = task_info_.find(received_index_);
      if (task != task_info_.end()) {
        if (task->second.has_data || status_[task->second.worker]) return true;
        task_info_.erase(task);
      }
      ++received_index_;
    }
    return false;
  }
  bool next_is_stored() const { return task_info_.at(received_index_).has_data; }

  uint64_t take_stored() {
    const uint64_t index = received_index_++;
    finish(index);
    return index;
  }

  // An answer: the batch that it lets the trainer have now, if any.
  std::optional<uint64_t> receive(uint64_t index) {
    --tasks_outstanding_;
    if (index == received_index_) {
      ++received_index_;
    } else if (in_order_) {
      task_info_.at(index).has_data = true;
      return std::nullopt;
    }
    finish(index);
    return index;
  }
  void end(uint32_t worker) {
    --tasks_outstanding_;
    status_[worker] = false;
  }
  uint32_t tasks_outstanding() const { return tasks_outstanding_; }

 private:
  struct Task {
    uint32_t worker;
    bool has_data;
  };
  void finish(uint64_t index) {
    --worker_tasks_[task_info_.at(index).worker];
    task_info_.erase(index);
  }

  uint32_t max_tasks_;
  bool in_order_;
  std::vector<bool> status_;
  std::vector<uint32_t> worker_tasks_;
  std::map<uint64_t, Task> task_info_;
  uint64_t send_index_ = 0;
  uint64_t received_index_ = 0;
  uint32_t tasks_outstanding_ = 0;
  uint32_t cycle_ = 0;
};

struct Epoch {
  uint32_t worker_count = 1;
  uint32_t prefetch_factor = 2;
  bool in_order = true;
  uint64_t index_count = 0;                  // the sampler's indices
  std::vector<uint64_t> worker_shares = {};  // batches that each worker has; without end when empty
};

// A trainer and its workers, with both orders side by side. Which worker answers next is drawn.
class RequestOrderTest : public test::SeededTest {
 protected:
  // Runs one epoch to its end and returns the sequences in the order in which they were delivered.
  std::vector<uint64_t> run(const Epoch& epoch) {
    epoch_ = epoch;
    order_.emplace(RequestOrderOptions{epoch.worker_count, epoch.worker_count * epoch.prefetch_factor,
                                       epoch.in_order ? 0 : kAnyOrder});
    torch_.emplace(epoch.worker_count, epoch.prefetch_factor, epoch.in_order);
    queues_.assign(epoch.worker_count, {});
    answered_counts_.assign(epoch.worker_count, 0);
    has_ended_.assign(epoch.worker_count, false);
    indices_left_ = epoch.index_count;
    delivered_.clear();
    workers_by_sequence_.clear();
    for (uint32_t request = 0; request < epoch.worker_count * epoch.prefetch_factor; ++request) put();
    while (!HasFailure() && step()) {
    }
    return delivered_;
  }

  // Torch asks its sampler first: an index that no worker takes is lost.
  void put() {
    if (indices_left_ == 0) return;
    --indices_left_;
    const auto assignment = order_->assign();
    const auto expected = torch_->put_index();
    ASSERT_EQ(assignment.has_value(), expected.has_value());
    if (!assignment) return;
    ASSERT_EQ(assignment->shard_id, *expected);
    ASSERT_EQ(assignment->sequence, workers_by_sequence_.size());
    queues_[assignment->shard_id].push_back(assignment->sequence);
    workers_by_sequence_.push_back(assignment->shard_id);
  }

  // The trainer's next(): false at the end of the epoch.
  bool step() {
    const bool is_more = torch_->find_next();
    const auto next = order_->next();
    EXPECT_EQ(next == RequestOrder::Next::kEnd, !is_more);
    if (!is_more || HasFailure()) return false;
    EXPECT_EQ(next == RequestOrder::Next::kReady, torch_->next_is_stored());
    if (next == RequestOrder::Next::kReady) {
      const uint64_t sequence = order_->ready_sequence();
      EXPECT_EQ(sequence, torch_->take_stored());
      deliver(sequence);
      return true;
    }
    answer();
    return true;
  }

  void answer() {
    std::vector<uint32_t> candidates;
    for (uint32_t worker = 0; worker < epoch_.worker_count; ++worker) {
      if (!queues_[worker].empty() && !has_ended_[worker]) candidates.push_back(worker);
    }
    ASSERT_FALSE(candidates.empty()) << "the trainer waits and nobody has a request";
    const uint32_t worker = candidates[draw<size_t>(0, candidates.size() - 1)];
    const uint64_t sequence = queues_[worker].front();
    queues_[worker].pop_front();
    if (!epoch_.worker_shares.empty() && answered_counts_[worker] == epoch_.worker_shares[worker]) {
      has_ended_[worker] = true;
      EXPECT_EQ(order_->shard_ended(sequence), worker);
      torch_->end(worker);
      EXPECT_FALSE(order_->is_active(worker));
      put();
      return;
    }
    ++answered_counts_[worker];
    const bool is_next = order_->arrived(sequence);
    const auto expected = torch_->receive(sequence);
    ASSERT_EQ(is_next, expected.has_value());
    if (is_next) deliver(sequence);
  }

  void deliver(uint64_t sequence) {
    order_->delivered(sequence);
    delivered_.push_back(sequence);
    put();
    EXPECT_EQ(order_->outstanding_count(), torch_->tasks_outstanding());
    EXPECT_LE(order_->outstanding_count(), order_->outstanding_count_max());
  }

  Epoch draw_epoch() {
    Epoch epoch{.worker_count = draw(1u, 6u),
                .prefetch_factor = draw(1u, 4u),
                .in_order = toss(),
                .index_count = draw<uint64_t>(0, 80)};
    if (toss()) {
      epoch.index_count = 1'000'000;
      for (uint32_t worker = 0; worker < epoch.worker_count; ++worker) {
        epoch.worker_shares.push_back(draw<uint64_t>(0, 12));
      }
    }
    return epoch;
  }
  static uint64_t batch_count(const Epoch& epoch) {
    uint64_t count = 0;
    for (const uint64_t share : epoch.worker_shares) count += share;
    return epoch.worker_shares.empty() ? epoch.index_count : count;
  }

  Epoch epoch_;
  std::optional<RequestOrder> order_;
  std::optional<TorchOrder> torch_;
  std::vector<std::deque<uint64_t>> queues_;
  std::vector<uint64_t> answered_counts_;
  std::vector<bool> has_ended_;
  std::vector<uint32_t> workers_by_sequence_;
  uint64_t indices_left_ = 0;
  std::vector<uint64_t> delivered_;
};

TEST_F(RequestOrderTest, RandomEpochsGoAsTorchsAndDeliverEveryBatchOnce) {
  for (int round = 0; round < 3000 && !HasFailure(); ++round) {
    const Epoch epoch = draw_epoch();
    const auto delivered = run(epoch);
    const std::set<uint64_t> once(delivered.begin(), delivered.end());
    EXPECT_EQ(once.size(), delivered.size());
    EXPECT_EQ(delivered.size(), batch_count(epoch)) << "workers " << epoch.worker_count;
    if (epoch.in_order) {
      EXPECT_TRUE(std::is_sorted(delivered.begin(), delivered.end()));
    }
  }
}

TEST_F(RequestOrderTest, InOrderBatchesComeBySequenceHoweverTheyArrive) {
  std::vector<uint64_t> expected(50);
  for (uint64_t sequence = 0; sequence < 50; ++sequence) expected[sequence] = sequence;
  EXPECT_EQ(run({.worker_count = 4, .prefetch_factor = 3, .index_count = 50}), expected);
}

TEST_F(RequestOrderTest, WorkersTakeTurns) {
  run({.worker_count = 3, .prefetch_factor = 2, .index_count = 30});
  for (uint64_t sequence = 0; sequence < 30; ++sequence) EXPECT_EQ(workers_by_sequence_[sequence], sequence % 3);
}

TEST_F(RequestOrderTest, AResumedEpochGoesOnWithTheRequestAndTheShardThatItWasAt) {
  RequestOrder order({.shard_count = 3, .outstanding_count_max = 6, .first_sequence = 7, .first_shard_id = 2});
  EXPECT_EQ(order.next(), RequestOrder::Next::kEnd) << "nothing was asked for";
  for (const uint32_t shard_id : {2u, 0u, 1u, 2u}) {
    const auto assignment = order.assign();
    ASSERT_TRUE(assignment);
    EXPECT_EQ(assignment->shard_id, shard_id);
  }
  EXPECT_FALSE(order.arrived(8));
  EXPECT_EQ(order.next(), RequestOrder::Next::kWait);
  EXPECT_TRUE(order.arrived(7));
  EXPECT_EQ(order.delivered(7), 2u);
  EXPECT_EQ(order.next(), RequestOrder::Next::kReady);
  EXPECT_EQ(order.ready_sequence(), 8u);
  EXPECT_EQ(order.delivered(8), 0u);
}

TEST_F(RequestOrderTest, AnAnswerToARequestThatIsNotMissingIsABug) {
  RequestOrder order({.shard_count = 1, .outstanding_count_max = 4, .first_sequence = 7, .missing = {2, 5}});
  for (const uint64_t sequence : {2u, 5u, 7u, 8u}) EXPECT_EQ(order.assign()->sequence, sequence);
  EXPECT_TRUE(order.is_outstanding(5));
  EXPECT_FALSE(order.is_outstanding(3));
  EXPECT_THROW(order.arrived(3), AssertionFailure);
  EXPECT_THROW(RequestOrder({.first_sequence = 7, .missing = {5, 2}}), AssertionFailure);
  EXPECT_THROW(RequestOrder({.first_sequence = 7, .missing = {7}}), AssertionFailure);
}

TEST_F(RequestOrderTest, AFirstShardThatIsNotThereIsABug) {
  EXPECT_THROW(RequestOrder({.shard_count = 2, .outstanding_count_max = 2, .first_shard_id = 2}), AssertionFailure);
}

TEST_F(RequestOrderTest, FreeOrderGivesNoWorkerMoreThanItsShareOfTheRequests) {
  RequestOrder order({.shard_count = 2, .outstanding_count_max = 4, .overtaking_max = kAnyOrder});
  for (int request = 0; request < 4; ++request) ASSERT_TRUE(order.assign());
  // Worker 1 answers twice while worker 0 is silent: both new requests must go to worker 1.
  for (const uint64_t sequence : {1u, 3u}) {
    ASSERT_TRUE(order.arrived(sequence));
    order.delivered(sequence);
    const auto assignment = order.assign();
    ASSERT_TRUE(assignment);
    EXPECT_EQ(assignment->shard_id, 1u);
  }
}

TEST_F(RequestOrderTest, AWorkerThatEndedGetsNothingMoreAndItsOtherRequestsAreSkipped) {
  RequestOrder order({.shard_count = 2, .outstanding_count_max = 4});
  for (int request = 0; request < 4; ++request) ASSERT_TRUE(order.assign());
  EXPECT_EQ(order.shard_ended(0), 0u);
  EXPECT_EQ(order.assign()->shard_id, 1u);
  ASSERT_EQ(order.next(), RequestOrder::Next::kWait) << "request 1 is worker 1's";
  EXPECT_TRUE(order.arrived(1));
  order.delivered(1);
  ASSERT_EQ(order.next(), RequestOrder::Next::kWait);
  EXPECT_TRUE(order.arrived(3)) << "request 2 was worker 0's and is skipped";
}

TEST_F(RequestOrderTest, WithoutWorkersThatHaveDataNothingIsAssignedAndTheEpochEnds) {
  RequestOrder order({.shard_count = 1, .outstanding_count_max = 2});
  ASSERT_TRUE(order.assign());
  ASSERT_TRUE(order.assign());
  EXPECT_EQ(order.shard_ended(0), 0u);
  EXPECT_FALSE(order.assign());
  EXPECT_EQ(order.next(), RequestOrder::Next::kEnd);
}

TEST_F(RequestOrderTest, NothingAskedIsTheEnd) {
  RequestOrder order({.shard_count = 3, .outstanding_count_max = 6});
  EXPECT_EQ(order.next(), RequestOrder::Next::kEnd);
}

TEST_F(RequestOrderTest, TheOldestRequestThatCanStillBeAnsweredIsAwaited) {
  RequestOrder order({.shard_count = 2, .outstanding_count_max = 4});
  EXPECT_FALSE(order.awaited());
  for (int request = 0; request < 4; ++request) ASSERT_TRUE(order.assign());
  EXPECT_EQ(order.awaited()->sequence, 0u);
  order.arrived(0);
  EXPECT_EQ(order.awaited()->sequence, 1u);
  EXPECT_EQ(order.awaited()->shard_id, 1u);
  EXPECT_EQ(order.undelivered_count(), 4u);
  EXPECT_EQ(order.shard_ended(1), 1u);
  EXPECT_EQ(order.undelivered_count(), 2u) << "request 3 will not be answered";
  EXPECT_EQ(order.awaited()->sequence, 2u);
  EXPECT_EQ(order.awaited()->shard_id, 0u);
}

TEST_F(RequestOrderTest, MoreShardsThanRequestsInFlightTakeTurnsToo) {
  for (const bool in_order : {true, false}) {
    RequestOrder order({.shard_count = 5, .outstanding_count_max = 2, .overtaking_max = in_order ? 0 : kAnyOrder});
    ASSERT_TRUE(order.assign());
    for (uint64_t sequence = 0; sequence < 10; ++sequence) {
      const auto assignment = order.assign();
      ASSERT_TRUE(assignment);
      EXPECT_EQ(assignment->shard_id, (sequence + 1) % 5);
      order.arrived(sequence);
      order.delivered(sequence);
    }
  }
}

// One schedule: answers arrive in a random order, now and then before others were asked for, and shards may end.
void check_window(std::mt19937_64& random, uint32_t window) {
  const auto draw = [&](uint64_t count) { return random() % count; };
  const auto shard_count = static_cast<uint32_t>(1 + draw(4));
  const auto outstanding_max = static_cast<uint32_t>(shard_count * (1 + draw(4)));
  const uint64_t batch_count = draw(40);
  const uint64_t first = draw(9);
  std::vector<uint64_t> missing;  // of a resumed epoch
  for (uint64_t sequence = 0; sequence < first; ++sequence)
    if (draw(3) == 0) missing.push_back(sequence);
  RequestOrder order({.shard_count = shard_count,
                      .outstanding_count_max = outstanding_max,
                      .overtaking_max = window,
                      .first_sequence = first,
                      .missing = missing});
  std::vector<uint64_t> asked;
  std::set<uint64_t> delivered;
  std::set<uint64_t> arrived;
  std::set<uint64_t> undelivered;
  uint64_t delivered_count = 0;
  const auto deliver = [&](uint64_t sequence) {
    ASSERT_EQ(undelivered.count(sequence), 1u) << "delivered twice, or never asked for";
    undelivered.erase(sequence);
    arrived.erase(sequence);
    order.delivered(sequence);
    ++delivered_count;
    delivered.insert(sequence);
    if (undelivered.empty()) return;
    const auto later = std::distance(delivered.upper_bound(*undelivered.begin()), delivered.end());
    ASSERT_LE(later, window) << "the window was passed";
  };
  const auto settle = [&] {
    while (order.next() == RequestOrder::Next::kReady) {
      ASSERT_EQ(arrived.count(order.ready_sequence()), 1u);
      deliver(order.ready_sequence());
    }
  };
  while (delivered_count < batch_count) {
    std::vector<uint64_t> in_flight;
    for (const uint64_t sequence : undelivered)
      if (arrived.count(sequence) == 0) in_flight.push_back(sequence);
    const bool asks = asked.size() < batch_count && order.outstanding_count() < outstanding_max && draw(2) == 0;
    if (asks || in_flight.empty()) {
      ASSERT_LT(asked.size(), batch_count) << undelivered.size() << " batches are here and not delivered";
      const auto assignment = order.assign();
      ASSERT_TRUE(assignment) << "its indices would be lost";
      asked.push_back(assignment->sequence);
      undelivered.insert(assignment->sequence);
      continue;
    }
    const uint64_t sequence = in_flight[draw(in_flight.size())];
    arrived.insert(sequence);
    const bool is_next = order.arrived(sequence);
    if (is_next && draw(4) > 0) deliver(sequence);
    settle();
  }
  EXPECT_EQ(order.next(), RequestOrder::Next::kEnd);
  std::vector<uint64_t> expected = missing;
  for (uint64_t sequence = first; expected.size() < batch_count; ++sequence) expected.push_back(sequence);
  expected.resize(batch_count);
  EXPECT_EQ(asked, expected) << "missing requests come first";
}

TEST_F(RequestOrderTest, AtMostAWindowOfBatchesOvertakesTheOldest) {
  for (int schedule = 0; schedule < 100'000; ++schedule) {
    const auto window = static_cast<uint32_t>(random()() % 12);
    check_window(random(), window);
    ASSERT_FALSE(HasFailure()) << "schedule " << schedule << ", window " << window;
  }
}

TEST_F(RequestOrderTest, AWindowGivesWayOnceTheOldestIsDelivered) {
  RequestOrder order({.shard_count = 1, .outstanding_count_max = 8, .overtaking_max = 2});
  for (int count = 0; count < 6; ++count) ASSERT_TRUE(order.assign());
  for (const uint64_t sequence : {1u, 2u}) {
    EXPECT_TRUE(order.arrived(sequence));
    order.delivered(sequence);
  }
  EXPECT_TRUE(order.waits_for_oldest());
  for (const uint64_t sequence : {4u, 5u}) EXPECT_FALSE(order.arrived(sequence));
  EXPECT_EQ(order.next(), RequestOrder::Next::kWait);
  EXPECT_TRUE(order.arrived(0));
  order.delivered(0);
  for (const uint64_t sequence : {4u, 5u}) {
    ASSERT_EQ(order.next(), RequestOrder::Next::kReady);
    EXPECT_EQ(order.ready_sequence(), sequence);
    order.delivered(sequence);
  }
  EXPECT_EQ(order.next(), RequestOrder::Next::kWait);
}

TEST_F(RequestOrderTest, AnAnswerToNoRequestAsserts) {
  RequestOrder order({.shard_count = 1, .outstanding_count_max = 2});
  EXPECT_THROW(order.arrived(0), AssertionFailure);
  ASSERT_TRUE(order.assign());
  order.arrived(0);
  EXPECT_THROW(order.arrived(0), AssertionFailure) << "the same answer twice";
}

TEST_F(RequestOrderTest, AskingForMoreThanThePrefetchBoundAsserts) {
  RequestOrder order({.shard_count = 2, .outstanding_count_max = 2});
  ASSERT_TRUE(order.assign());
  ASSERT_TRUE(order.assign());
  EXPECT_THROW(order.assign(), AssertionFailure);
}

}  // namespace
}  // namespace penstock::session
