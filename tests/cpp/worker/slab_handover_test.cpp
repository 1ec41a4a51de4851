// SPDX-License-Identifier: Apache-2.0
// Batches that a worker hands over as slabs, against the trainer's half by hand.
#include "server/answer_outbox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/process.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "worker/slab_writer.h"

namespace penstock::worker {
namespace {

constexpr uint64_t kTrainer = 7;
constexpr uint64_t kBatchBytes = 4096;

// What the trainer does: it maps the arenas that are passed, reads slabs and releases them.
class Trainer {
 public:
  explicit Trainer(shm::Channel channel) : channel_(std::move(channel)) {}

  // The bytes of the batch that lies there.
  const std::byte* read(const wire::SlabPlace& place) {
    while (!arenas_.contains(place.arena_id)) {
      const auto received = channel_.receive(std::chrono::steady_clock::now());
      const auto arena = received ? received.value().as<wire::HandoverArena>() : std::nullopt;
      if (!arena || received.value().fds.size() != 1) return nullptr;
      arenas_[arena->arena_id] = shm::ArenaView::map(received.value().fds.front()).value();
    }
    return arenas_[place.arena_id]->slab(place.slab_index);
  }
  void release(const wire::SlabPlace& place) { arenas_[place.arena_id]->release(place.slab_index, place.generation); }
  size_t arena_count() const { return arenas_.size(); }

 private:
  shm::Channel channel_;
  std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas_;
};

class SlabHandoverTest : public ::testing::Test {
 protected:
  std::unique_ptr<SlabBatch> make_batch(int value) {
    auto region = slabs_.acquire_now(kBatchBytes);
    EXPECT_TRUE(region);
    std::memset(region.value().data(), value, kBatchBytes);
    return std::make_unique<SlabBatch>(SealedBatch{.region = std::move(region).value(),
                                                   .record_offset = kBatchBytes - 64,
                                                   .record_bytes = 64,
                                                   .record = {},
                                                   .payload = {}});
  }

  // What a trainer does before it greets the worker on a new link.
  Trainer connect(uint32_t link, uint64_t trainer_id = kTrainer) {
    auto channel = shm::Channel::connect(name_);
    EXPECT_TRUE(channel) << channel.error().message;
    const wire::HandoverHello hello{.trainer_id = trainer_id, .link = link};
    EXPECT_TRUE(channel.value().send_record(hello));
    return Trainer(std::move(channel).value());
  }

  static bool is_full_of(const std::byte* bytes, int value) {
    return bytes != nullptr && std::all_of(bytes, bytes + kBatchBytes,
                                           [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }

  // Slabs that a batch can have now, of the arena of the last one.
  size_t free_slab_count() {
    std::vector<shm::SlabRegion> taken;
    for (;;) {
      auto region = slabs_.acquire_now(kBatchBytes).value();
      const bool is_lasting = !region.is_transient;
      taken.push_back(std::move(region));
      if (!is_lasting) break;
    }
    for (const auto& region : taken) region.arena->cancel(region.slab_index);
    return taken.size() - 1;
  }

  const std::string name_ = make_endpoint_name();
  std::atomic<bool> is_closing_{false};
  shm::SlabPool slabs_{{.arena_bytes = 1 << 20, .prefetch_factor = 2, .waits = false}, is_closing_};  // four slabs
  std::unique_ptr<server::SlabHandover> handover_ = server::SlabHandover::listen(name_, slabs_).value();
};

TEST_F(SlabHandoverTest, BatchIsReadWhereItWasWritten) {
  auto trainer = connect(1);
  handover_->begin(kTrainer, 1);
  ASSERT_TRUE(handover_->is_on());
  for (int value = 1; value <= 3; ++value) {
    auto batch = make_batch(value);
    const auto place = handover_->hand_over(*batch);
    ASSERT_TRUE(place);
    EXPECT_TRUE(is_full_of(trainer.read(*place), value));
    std::memset(batch->region()->data(), 9, 1);
    EXPECT_EQ(trainer.read(*place)[0], std::byte{9}) << "it is one memory";
  }
  EXPECT_EQ(trainer.arena_count(), 1u) << "an arena is passed once";
}

TEST_F(SlabHandoverTest, SlabIsFreeWhenTheTrainerHasReleasedItAndTheWorkerKnowsThatItArrived) {
  auto trainer = connect(1);
  handover_->begin(kTrainer, 1);
  auto batch = make_batch(1);
  auto place = handover_->hand_over(*batch).value();
  ASSERT_TRUE(is_full_of(trainer.read(place), 1));
  EXPECT_EQ(free_slab_count(), 3u);
  trainer.release(place);
  EXPECT_EQ(free_slab_count(), 3u) << "the batch may have to be sent again";
  batch.reset();
  EXPECT_EQ(free_slab_count(), 4u);

  batch = make_batch(2);
  place = handover_->hand_over(*batch).value();
  batch.reset();
  EXPECT_EQ(free_slab_count(), 3u) << "the trainer reads it";
  EXPECT_TRUE(is_full_of(trainer.read(place), 2));
  trainer.release(place);
  EXPECT_EQ(free_slab_count(), 4u);
}

TEST_F(SlabHandoverTest, BatchThatIsSentOnceMoreIsACopy) {
  auto on_first_link = connect(1);
  handover_->begin(kTrainer, 1);
  auto batch = make_batch(1);
  const auto first = handover_->hand_over(*batch).value();
  ASSERT_TRUE(is_full_of(on_first_link.read(first), 1));
  auto on_second_link = connect(2);
  handover_->begin(kTrainer, 2);
  const auto second = handover_->hand_over(*batch);
  ASSERT_TRUE(second);
  EXPECT_TRUE(second->is_transient);
  EXPECT_NE(second->arena_id, first.arena_id);
  std::memset(batch->region()->data(), 9, kBatchBytes);
  EXPECT_TRUE(is_full_of(on_second_link.read(*second), 1)) << "whatever becomes of the first slab";
}

TEST_F(SlabHandoverTest, SlabsOfWhichATrainerNeverHeardAreNotMissedOnItsNextLink) {
  const auto deaf = connect(1);
  handover_->begin(kTrainer, 1);
  for (int value = 0; value < 3; ++value) {
    const auto batch = make_batch(value);
    static_cast<void>(handover_->hand_over(*batch));
  }
  auto trainer = connect(2);
  handover_->begin(kTrainer, 2);
  EXPECT_EQ(free_slab_count(), 4u) << "in an arena of its own";
  auto batch = make_batch(5);
  EXPECT_TRUE(is_full_of(trainer.read(handover_->hand_over(*batch).value()), 5));
}

TEST_F(SlabHandoverTest, TrainerThatGreetsTwiceBeforeItIsHeardIsTakenInOnItsLaterLink) {
  const auto first = connect(1);
  auto second = connect(2);
  handover_->begin(kTrainer, 1);
  EXPECT_TRUE(handover_->is_on());
  handover_->begin(kTrainer, 2);
  ASSERT_TRUE(handover_->is_on());
  auto batch = make_batch(1);
  EXPECT_TRUE(is_full_of(second.read(handover_->hand_over(*batch).value()), 1));
}

TEST_F(SlabHandoverTest, TrainerThatHungUpGetsItsBatchesInPieces) {
  static_cast<void>(connect(1));
  handover_->begin(kTrainer, 1);
  const auto batch = make_batch(1);
  EXPECT_FALSE(handover_->hand_over(*batch));
  EXPECT_FALSE(batch->is_handed_over());
  EXPECT_FALSE(handover_->is_on());
}

TEST_F(SlabHandoverTest, OnlyTheTrainerOfTheLinkIsTakenIn) {
  handover_->begin(kTrainer, 1);
  EXPECT_FALSE(handover_->is_on()) << "nobody has connected";
  const auto other_trainer = connect(3, kTrainer + 1);
  const auto silent = shm::Channel::connect(name_).value();
  handover_->begin(kTrainer, 3);
  EXPECT_FALSE(handover_->is_on());
  const auto trainer = connect(4);
  handover_->begin(kTrainer, 4);
  EXPECT_TRUE(handover_->is_on());
  handover_->end();
  EXPECT_FALSE(handover_->is_on());
}

}  // namespace
}  // namespace penstock::worker
