// SPDX-License-Identifier: Apache-2.0
#include "base/mutex.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace penstock {
namespace {

using std::chrono::steady_clock;

// Two threads take turns by it.
struct Turns {
  Mutex mutex;
  Condition changed;
  int turn PENSTOCK_GUARDED_BY(mutex) = 0;
};

TEST(Mutex, CountsOfManyThreadsAddUp) {
  struct {
    Mutex mutex;
    int64_t count PENSTOCK_GUARDED_BY(mutex) = 0;
  } shared;
  {
    std::vector<std::jthread> threads;
    for (int thread_index = 0; thread_index < 4; ++thread_index) {
      threads.emplace_back([&shared] {
        for (int i = 0; i < 10'000; ++i) {
          MutexLock lock(shared.mutex);
          ++shared.count;
        }
      });
    }
  }
  MutexLock lock(shared.mutex);
  EXPECT_EQ(shared.count, 40'000);
}

TEST(Condition, WaitersSeeEachOthersTurns) {
  constexpr int kTurnCount = 1000;
  Turns turns;
  const auto play = [&turns](int parity) {
    for (int i = parity; i < kTurnCount; i += 2) {
      MutexLock lock(turns.mutex);
      while (turns.turn != i) turns.changed.wait(turns.mutex);
      ++turns.turn;
      turns.changed.notify_one();
    }
  };
  {
    std::jthread even(play, 0);
    std::jthread odd(play, 1);
  }
  MutexLock lock(turns.mutex);
  EXPECT_EQ(turns.turn, kTurnCount);
}

TEST(Condition, WaitingUntilAPastDeadlineReturnsFalseWithTheMutexHeld) {
  Turns turns;
  {
    MutexLock lock(turns.mutex);
    EXPECT_FALSE(turns.changed.wait_until(turns.mutex, steady_clock::now() - std::chrono::seconds(1)));
    ++turns.turn;
  }
  // Would block for ever if the wait had left the mutex in a wrong state.
  MutexLock lock(turns.mutex);
  EXPECT_EQ(turns.turn, 1);
}

TEST(Condition, NotifyAllWakesEveryWaiter) {
  Turns turns;
  {
    std::vector<std::jthread> waiters;
    for (int waiter_index = 0; waiter_index < 3; ++waiter_index) {
      waiters.emplace_back([&turns] {
        MutexLock lock(turns.mutex);
        while (turns.turn == 0) turns.changed.wait(turns.mutex);
        ++turns.turn;
      });
    }
    {
      MutexLock lock(turns.mutex);
      turns.turn = 1;
    }
    turns.changed.notify_all();
  }
  MutexLock lock(turns.mutex);
  EXPECT_EQ(turns.turn, 4);
}

steady_clock::time_point past() { return steady_clock::now() - std::chrono::seconds(1); }
// Far enough that a test which relies on it being reached would be seen to hang.
steady_clock::time_point far() { return steady_clock::now() + std::chrono::hours(1); }

TEST(BoundedQueue, HandsOutInOrder) {
  BoundedQueue<int> queue(3);
  for (int item : {1, 2, 3}) ASSERT_TRUE(queue.push(item));
  EXPECT_EQ(queue.size(), 3u);
  for (int item : {1, 2, 3}) EXPECT_EQ(queue.try_pop(), item);
  EXPECT_EQ(queue.try_pop(), std::nullopt);
}

TEST(BoundedQueue, RefusesAboveItsCapacityAndLeavesTheItem) {
  BoundedQueue<std::unique_ptr<int>> queue(1);
  ASSERT_TRUE(queue.push(std::make_unique<int>(1)));
  auto second = std::make_unique<int>(2);
  EXPECT_FALSE(queue.try_push(second));
  ASSERT_NE(second, nullptr);
  queue.try_pop();
  EXPECT_TRUE(queue.try_push(second));
  EXPECT_EQ(second, nullptr);
}

TEST(BoundedQueue, PopUntilAPastDeadlineOnAnEmptyQueueReturnsNothing) {
  BoundedQueue<int> queue(1);
  EXPECT_EQ(queue.pop_until(past()), std::nullopt);
}

TEST(BoundedQueue, PopUntilAPastDeadlineHandsOutWhatIsThere) {
  BoundedQueue<int> queue(1);
  ASSERT_TRUE(queue.push(5));
  EXPECT_EQ(queue.pop_until(past()), 5);
}

TEST(BoundedQueue, WaitUntilTellsWhetherThereIsAnItemAndLeavesIt) {
  BoundedQueue<int> queue(1);
  EXPECT_FALSE(queue.wait_until(past()));
  ASSERT_TRUE(queue.push(5));
  EXPECT_TRUE(queue.wait_until(far()));
  EXPECT_EQ(queue.size(), 1u);
}

TEST(BoundedQueue, ClosingHandsOutWhatIsLeftAndThenNothing) {
  BoundedQueue<int> queue(2);
  ASSERT_TRUE(queue.push(1));
  ASSERT_FALSE(queue.is_closed());
  queue.close();
  EXPECT_TRUE(queue.is_closed());
  EXPECT_FALSE(queue.push(2));
  int third = 3;
  EXPECT_FALSE(queue.try_push(third));
  EXPECT_TRUE(queue.wait_until(far()));
  EXPECT_EQ(queue.pop_until(far()), 1);
  EXPECT_EQ(queue.pop_until(far()), std::nullopt);
  EXPECT_FALSE(queue.wait_until(far()));
}

TEST(BoundedQueue, ClosingReleasesAWaitingConsumer) {
  BoundedQueue<int> queue(1);
  std::optional<int> popped = 1;
  bool waited = true;
  {
    std::jthread popper([&] { popped = queue.pop_until(far()); });
    std::jthread waiter([&] { waited = queue.wait_until(far()); });
    queue.close();
  }
  EXPECT_EQ(popped, std::nullopt);
  EXPECT_FALSE(waited);
}

TEST(BoundedQueue, ClosingReleasesAWaitingProducerAndDropsItsItem) {
  BoundedQueue<int> queue(1);
  ASSERT_TRUE(queue.push(1));
  bool pushed = true;
  {
    std::jthread producer([&] { pushed = queue.push(2); });
    queue.close();
  }
  EXPECT_FALSE(pushed);
  EXPECT_EQ(queue.try_pop(), 1);
  EXPECT_EQ(queue.try_pop(), std::nullopt);
}

TEST(BoundedQueue, PoppingLetsAWaitingProducerIn) {
  BoundedQueue<int> queue(1);
  ASSERT_TRUE(queue.push(1));
  std::jthread producer([&] { EXPECT_TRUE(queue.push(2)); });
  EXPECT_EQ(queue.pop_until(far()), 1);
  EXPECT_EQ(queue.pop_until(far()), 2);
}

// Every item arrives once, each producer's items in its order, and never more than the capacity are held.
TEST(BoundedQueue, ManyProducersAndConsumersLoseNothing) {
  constexpr int kProducerCount = 3;
  constexpr int kConsumerCount = 2;
  constexpr int kItemCount = 2000;
  constexpr size_t kCapacity = 4;
  struct Item {
    int producer_index;
    int sequence;
  };
  BoundedQueue<Item> queue(kCapacity);
  std::atomic<int> arrived_count{0};
  std::atomic<int64_t> arrived_sum{0};
  {
    std::vector<std::jthread> consumers;
    for (int i = 0; i < kConsumerCount; ++i) {
      consumers.emplace_back([&] {
        std::vector<int> last(kProducerCount, -1);
        while (const auto item = queue.pop_until(far())) {
          EXPECT_GT(item->sequence, last[static_cast<size_t>(item->producer_index)]);
          last[static_cast<size_t>(item->producer_index)] = item->sequence;
          EXPECT_LE(queue.size(), kCapacity);
          ++arrived_count;
          arrived_sum += item->sequence;
        }
      });
    }
    {
      std::vector<std::jthread> producers;
      for (int producer_index = 0; producer_index < kProducerCount; ++producer_index) {
        producers.emplace_back([&queue, producer_index] {
          for (int sequence = 0; sequence < kItemCount; ++sequence) {
            ASSERT_TRUE(queue.push({producer_index, sequence}));
          }
        });
      }
    }
    queue.close();
  }
  EXPECT_EQ(arrived_count, kProducerCount * kItemCount);
  EXPECT_EQ(arrived_sum, int64_t{kProducerCount} * kItemCount * (kItemCount - 1) / 2);
}

}  // namespace
}  // namespace penstock
