// SPDX-License-Identifier: Apache-2.0
#include "server/batch_store.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "wire/frame.h"

namespace penstock::server {
namespace {

using Comparison = session::NamedBatches::Comparison;
using FoundKind = BatchStore::Found::Kind;

// One tensor of bytes, after a gap that no reader looks at.
class PlainBatch final : public HeldBatch {
 public:
  explicit PlainBatch(const std::string& values, std::byte gap = {}, wire::Encoding encoding = wire::Encoding::kPlain) {
    wire::Frame frame;
    const auto size = static_cast<int64_t>(values.size());
    frame.tensors.push_back({.encoding = encoding,
                             .offset = wire::kPayloadAlignment,
                             .bytes = values.size(),
                             .shape = {size},
                             .strides = {1}});
    const std::vector<std::byte> nest{std::byte{1}};
    frame.nest = nest;
    frame.payload_bytes = wire::kPayloadAlignment + values.size();
    bytes_.assign(wire::kPayloadAlignment, gap);
    bytes_.resize(frame.payload_bytes);
    std::memcpy(bytes_.data() + wire::kPayloadAlignment, values.data(), values.size());
    const auto record = wire::write_frame(frame);
    bytes_.insert(bytes_.end(), record.begin(), record.end());
    hold(bytes_, static_cast<uint32_t>(record.size()));
  }

 private:
  std::vector<std::byte> bytes_;
};

TEST(CompareBatches, OnlyValuesCount) {
  const PlainBatch batch("abcd");
  EXPECT_EQ(compare_batches(batch, PlainBatch("abcd", std::byte{7})), Comparison::kEqual) << "bytes between tensors";
  EXPECT_EQ(compare_batches(batch, PlainBatch("abce")), Comparison::kDifferent);
  EXPECT_EQ(compare_batches(batch, PlainBatch("abcde")), Comparison::kDifferent);
  EXPECT_EQ(compare_batches(PlainBatch("abcd", {}, wire::Encoding::kWithheld), batch), Comparison::kUnclear);
}

TEST(KeptBatch, HasTheBytesOfItsSourceAfterSomeSteps) {
  std::vector<std::byte> source(2 * kKeepStepBytes + 5);
  for (size_t place = 0; place < source.size(); place += 997) source[place] = static_cast<std::byte>(place);
  auto batch = KeptBatch::of_size(source.size(), 9);
  ASSERT_TRUE(batch);
  EXPECT_FALSE(batch.value()->copy_step(source).value());
  EXPECT_FALSE(batch.value()->copy_step(source).value());
  EXPECT_TRUE(batch.value()->copy_step(source).value());
  EXPECT_EQ(batch.value()->record_bytes(), 9);
  EXPECT_TRUE(std::ranges::equal(batch.value()->payload(), source));
}

TEST(KeptBatch, SizeThatNoMemoryHasIsAnError) { EXPECT_FALSE(KeptBatch::of_size(uint64_t{1} << 60, 0)); }

class BatchStoreTest : public testing::Test {
 protected:
  BatchStoreTest() {
    for (const uint64_t id : {uint64_t{1}, uint64_t{2}}) {
      store_.join(id, [this, id] { ++wake_counts_[id]; });
      store_.set_share(id, 1 << 20);
    }
  }

  static session::BatchName named(int samples, int epoch = 0) {
    return {.group = "job", .samples = std::to_string(samples), .epoch = std::to_string(epoch), .place = ""};
  }
  static std::shared_ptr<PoolResult> result_of(const std::string& values, bool draws_nothing = true) {
    auto result = std::make_shared<PoolResult>();
    result->batch = std::make_unique<PlainBatch>(values);
    result->may_be_kept = true;
    result->draws_nothing = draws_nothing;
    return result;
  }
  // Admits the batch as the machine's store does.
  std::optional<BatchStore::Id> admit(const session::BatchName& name, const session::Claimant& by,
                                      const PoolResult& made) {
    std::optional<Comparison> comparison;
    if (const auto twin = store_.twin_of(name)) comparison = compare_batches(*twin->batch, *made.batch);
    return store_.admit(name, by, {.bytes = made.batch->payload().size(), .draws_nothing = made.draws_nothing},
                        comparison);
  }
  // Requests a batch for worker `id` and makes it if need be. Returns whether it was kept.
  bool take(const session::BatchName& name, const std::string& values, uint64_t id = 1) {
    const session::Claimant by{.worker_id = id, .trainer_id = 10 + id};
    const auto answer = store_.ask(name, by, true);
    if (answer.kind == FoundKind::kKept) return true;
    EXPECT_EQ(answer.kind, FoundKind::kMake);
    const auto made = result_of(values);
    if (const auto entry = admit(name, by, *made)) store_.settle(*entry, made);
    return false;
  }

  std::map<uint64_t, int> wake_counts_;
  BatchStore store_;
};

TEST_F(BatchStoreTest, WorkersShareAndWakeEachOther) {
  EXPECT_TRUE(store_.is_on());
  store_.ask(named(1), {.worker_id = 1, .trainer_id = 11}, true);
  EXPECT_EQ(store_.ask(named(1), {.worker_id = 2, .trainer_id = 12}, true).kind, FoundKind::kWait);
  EXPECT_EQ(wake_counts_[2], 0);
  const auto made = result_of("abcd");
  store_.settle(admit(named(1), {.worker_id = 1, .trainer_id = 11}, *made).value(), made);
  EXPECT_EQ(wake_counts_[2], 1);
  EXPECT_EQ(store_.ask(named(1), {.worker_id = 2, .trainer_id = 12}, true).result, made);
  EXPECT_GE(store_.bytes_made_by(1), 4096 + session::kNameBytes) << "a page";
  EXPECT_EQ(store_.bytes_made_by(2), 0);
}

TEST_F(BatchStoreTest, OthersAreWokenWhenTheirWorkerLeaves) {
  store_.ask(named(1), {.worker_id = 1, .trainer_id = 11}, true);
  store_.ask(named(1), {.worker_id = 2, .trainer_id = 12}, true);
  store_.leave(1);
  EXPECT_EQ(wake_counts_[2], 1);
  EXPECT_EQ(store_.ask(named(1), {.worker_id = 2, .trainer_id = 12}, true).kind, FoundKind::kMake);
}

TEST_F(BatchStoreTest, TrialComparesTheValues) {
  EXPECT_FALSE(take(named(1), "one"));
  EXPECT_FALSE(take(named(2), "two"));
  EXPECT_FALSE(take(named(1, 1), "one"));
  EXPECT_TRUE(take(named(2, 1), "two", 2));
  EXPECT_TRUE(take(named(1, 2), "one", 2));
}

TEST_F(BatchStoreTest, TrialThatFailsKeepsBatchesBySeeds) {
  EXPECT_FALSE(take(named(1), "one of the first seed"));
  EXPECT_FALSE(take(named(2), "two of the first seed"));
  EXPECT_FALSE(take(named(1, 1), "one of another one"));
  EXPECT_FALSE(take(named(2, 1), "two of another one", 2));
  EXPECT_TRUE(take(named(2, 1), "two of another one", 1));
}

TEST_F(BatchStoreTest, BatchInUseOutlivesItsPlaceInTheStore) {
  take(named(1), "abcd");
  const auto answer = store_.ask(named(1), {.worker_id = 2, .trainer_id = 12}, true);
  store_.set_share(1, 0);
  store_.set_share(2, 0);
  EXPECT_FALSE(store_.is_on());
  EXPECT_EQ(store_.bytes_made_by(1), 0);
  EXPECT_EQ(compare_batches(*answer.result->batch, PlainBatch("abcd")), Comparison::kEqual);
}

TEST_F(BatchStoreTest, LittleMemoryDropsBatches) {
  take(named(1), std::string(100'000, 'a'));
  const uint64_t kept = store_.bytes_made_by(1);
  constexpr uint64_t kTotal = 1 << 30;
  store_.note_memory({.memory_bytes = kTotal, .memory_used_bytes = kTotal / 2});
  EXPECT_EQ(store_.bytes_made_by(1), kept);
  store_.note_memory({.memory_bytes = kTotal, .memory_used_bytes = kTotal - 1});
  EXPECT_EQ(store_.bytes_made_by(1), 0);
  EXPECT_FALSE(take(named(1), "values"));
  EXPECT_FALSE(take(named(1), "values")) << "nothing is kept";
  store_.note_memory({.memory_bytes = kTotal, .memory_used_bytes = kTotal / 2});
  EXPECT_FALSE(take(named(1), "values"));
  EXPECT_TRUE(take(named(1), "values"));
}

}  // namespace
}  // namespace penstock::server
