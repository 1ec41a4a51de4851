// SPDX-License-Identifier: Apache-2.0
#include "session/link_meter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <queue>
#include <vector>

#include "wire/pool_record.h"

namespace penstock::session {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

constexpr double kRate = 125e6;         // bytes a second, of a link
constexpr uint64_t kBatch = 1'250'000;  // 10 ms of it

// Workers that make batches in some time each, and send them over links of their own or over one. The clock of each
// worker began at another time.
class LinkMeterTest : public testing::Test {
 protected:
  void run(size_t worker_count, bool has_one_link, Duration making, int batch_count, Duration delay = microseconds(200),
           uint64_t batch_bytes = kBatch) {
    struct Event {
      Instant made_at;
      uint64_t worker_id;
      bool operator>(const Event& other) const { return made_at > other.made_at; }
    };
    std::priority_queue<Event, std::vector<Event>, std::greater<>> made;
    for (uint64_t worker_id = 1; worker_id <= worker_count; ++worker_id) {
      meter_.note_message(worker_id, clock(worker_id, now_), now_ + delay);
      made.push({now_ + making * static_cast<int64_t>(worker_id) / static_cast<int64_t>(worker_count), worker_id});
    }
    // Links that are shared are shared in turns, batch by batch.
    std::map<uint64_t, Instant> free_at;
    const auto crossing =
        std::chrono::duration_cast<Duration>(std::chrono::duration<double>(static_cast<double>(batch_bytes) / kRate));
    std::vector<std::pair<Instant, Event>> arrivals;
    for (int count = 0; count < batch_count; ++count) {
      const Event event = made.top();
      made.pop();
      Instant& link = free_at[has_one_link ? 0 : event.worker_id];
      link = std::max(link, event.made_at) + crossing;
      arrivals.push_back({link + delay, event});
      // Two batches are ahead at most.
      made.push({std::max(event.made_at + making, link), event.worker_id});
    }
    std::sort(arrivals.begin(), arrivals.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [at, event] : arrivals)
      meter_.note_batch(event.worker_id, clock(event.worker_id, event.made_at), batch_bytes, at);
    now_ = arrivals.back().first + milliseconds(1);
  }
  static Duration clock(uint64_t worker_id, Instant at) {
    return at.time_since_epoch() + seconds(static_cast<int64_t>(worker_id * worker_id * 1000));
  }

  Instant now_{seconds(5000)};
  LinkMeter meter_;
};

TEST_F(LinkMeterTest, NothingIsKnownBeforeBatchesCross) {
  EXPECT_FALSE(meter_.bytes_per_s(1));
  meter_.note_message(1, Duration(5), now_);
  EXPECT_FALSE(meter_.bytes_per_s(1));
}

TEST_F(LinkMeterTest, RateOfALinkIsFoundWhileItIsIdleForMostOfTheTime) {
  run(1, /*has_one_link=*/true, milliseconds(100), 20);
  EXPECT_NEAR(*meter_.bytes_per_s(1), kRate, 0.05 * kRate);
}

TEST_F(LinkMeterTest, RateOfALinkIsFoundWhileItIsFull) {
  run(1, /*has_one_link=*/true, milliseconds(1), 50);
  EXPECT_NEAR(*meter_.bytes_per_s(1), kRate, 0.05 * kRate);
}

TEST_F(LinkMeterTest, SmallBatchesTellTheRateToo) {
  run(1, /*has_one_link=*/true, milliseconds(20), 50, microseconds(200), 50'000);
  EXPECT_NEAR(*meter_.bytes_per_s(1), kRate, 0.05 * kRate);
}

TEST_F(LinkMeterTest, WorkersThatShareALinkHaveItsRateTogether) {
  run(4, /*has_one_link=*/true, milliseconds(15), 100);
  EXPECT_NEAR(*meter_.bytes_per_s(4), kRate, 0.15 * kRate);
}

TEST_F(LinkMeterTest, WorkersWithLinksOfTheirOwnHaveTheSum) {
  run(4, /*has_one_link=*/false, milliseconds(12), 100);
  EXPECT_NEAR(*meter_.bytes_per_s(4), 4 * kRate, 0.4 * kRate);
}

TEST_F(LinkMeterTest, WorkersThatNeverSendTogetherAreTakenToShareALink) {
  run(2, /*has_one_link=*/false, milliseconds(200), 20);
  EXPECT_NEAR(*meter_.bytes_per_s(2), kRate, 0.05 * kRate);
}

TEST_F(LinkMeterTest, ALinkThatBecameSlowerIsSeen) {
  run(1, /*has_one_link=*/true, milliseconds(20), 300, microseconds(200), kBatch / 10);
  run(1, /*has_one_link=*/true, milliseconds(20), 300, microseconds(200), kBatch / 10);
  const double before = *meter_.bytes_per_s(1);
  // The same bytes take ten times as long: as if the batches had ten times as many.
  for (int count = 0; count < 300; ++count) {
    now_ += milliseconds(30);
    meter_.note_batch(1, clock(1, now_ - milliseconds(10) - microseconds(200)), kBatch / 10, now_);
  }
  EXPECT_NEAR(*meter_.bytes_per_s(1), before / 10, 0.1 * before / 10);
}

// Once a trainer had taken its own machine's loopback for slow, batches were compressed for it, and the small ones that
// came of that made it look slow from then on.
TEST_F(LinkMeterTest, FastLinkDoesNotLookSlowForNarrowBatches) {
  const auto cross = [&](uint64_t bytes, Duration time, bool is_narrow) {
    now_ += milliseconds(20);
    meter_.note_message(1, clock(1, now_ - time - microseconds(200)), now_ - time);
    meter_.note_batch(1, clock(1, now_ - time - microseconds(200)), bytes, now_, is_narrow);
  };
  for (int count = 0; count < 10; ++count) cross(1'000'000, milliseconds(1), /*is_narrow=*/false);
  for (int count = 0; count < 900; ++count) cross(16'000, microseconds(100), /*is_narrow=*/true);
  EXPECT_NEAR(*meter_.bytes_per_s(1), 1e9, 0.05e9);
  EXPECT_FALSE(meter_.is_outdated());
  for (int count = 0; count < 200; ++count)  // some of them have waited for a thread
    cross(16'000, count % 10 < 3 ? milliseconds(3) : microseconds(100), /*is_narrow=*/true);
  EXPECT_TRUE(meter_.is_outdated()) << "the batches that told the rate were 20 s ago";
  EXPECT_FALSE(meter_.bytes_per_s(1));
  cross(1'000'000, milliseconds(1), /*is_narrow=*/false);
  EXPECT_TRUE(meter_.is_outdated()) << "one is too few";
  cross(1'000'000, milliseconds(1), /*is_narrow=*/false);
  EXPECT_FALSE(meter_.is_outdated());
  EXPECT_NEAR(*meter_.bytes_per_s(1), 1e9, 0.05e9);
}

TEST_F(LinkMeterTest, NarrowBatchesThatTakeTheirTimeTellTheRate) {
  const auto cross = [&](bool is_narrow) {
    now_ += milliseconds(20);
    meter_.note_message(1, clock(1, now_ - milliseconds(10) - microseconds(200)), now_ - milliseconds(10));
    meter_.note_batch(1, clock(1, now_ - milliseconds(10) - microseconds(200)), kBatch, now_, is_narrow);
  };
  for (int count = 0; count < 2000; ++count) cross(/*is_narrow=*/true);
  EXPECT_FALSE(meter_.is_outdated());
  EXPECT_NEAR(*meter_.bytes_per_s(1), kRate, 0.05 * kRate);
}

TEST_F(LinkMeterTest, PauseMakesNoRateOutdated) {
  run(1, /*has_one_link=*/true, milliseconds(100), 20);
  now_ += minutes(1);
  run(1, /*has_one_link=*/true, milliseconds(100), 1);
  EXPECT_FALSE(meter_.is_outdated());
}

TEST_F(LinkMeterTest, ClocksThatDriftAreFollowed) {
  for (int count = 0; count < 2000; ++count) {
    now_ += milliseconds(20);
    // The worker's clock loses 100 microseconds in a second.
    const Duration drift = now_.time_since_epoch() / 10'000;
    meter_.note_message(1, clock(1, now_ - microseconds(200)) - drift, now_);
    const Instant made_at = now_ - milliseconds(10) - microseconds(200);
    meter_.note_batch(1, clock(1, made_at) - drift, kBatch, now_);
  }
  EXPECT_NEAR(*meter_.bytes_per_s(1), kRate, 0.25 * kRate);
}

TEST_F(LinkMeterTest, ShortestRoundTripCounts) {
  EXPECT_FALSE(meter_.round_trip());
  meter_.note_round_trip(milliseconds(3));
  meter_.note_round_trip(milliseconds(1));
  meter_.note_round_trip(milliseconds(2));
  EXPECT_EQ(*meter_.round_trip(), milliseconds(1));
}

// A difference of such clocks overflowed.
TEST_F(LinkMeterTest, ClocksThatJumpAsFarAsTheyCanLeaveMeasuresThatMakeSense) {
  const Duration most(wire::kClockMax);
  Instant now = now_ + seconds(100);
  for (const Duration sent_at : {Duration(0), most, Duration(1), most, Duration(0)}) {
    now += milliseconds(1);
    meter_.note_message(1, sent_at, now);
    meter_.note_batch(1, sent_at, kBatch, now);
    const auto written_at = meter_.written_at(1, sent_at);
    ASSERT_TRUE(written_at);
    EXPECT_LE(*written_at, now);
  }
  const auto rate = meter_.bytes_per_s(1);
  ASSERT_TRUE(rate);
  EXPECT_GT(*rate, 0);
  EXPECT_LE(*rate, kBatch / 1e-6 * 2);
}

}  // namespace
}  // namespace penstock::session
