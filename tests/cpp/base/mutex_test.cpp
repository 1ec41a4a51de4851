// SPDX-License-Identifier: Apache-2.0
#include "base/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
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

}  // namespace
}  // namespace penstock
