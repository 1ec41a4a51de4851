// SPDX-License-Identifier: Apache-2.0
#include "loader/incoming_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "../wire/narrow_samples.h"
#include "../wire/record_samples.h"
#include "loader/batch_memory.h"
#include "wire/frame.h"

namespace penstock::loader {
namespace {

using wire::Encoding;
using wire::Frame;
using wire::make_entry;
using wire::TensorEntry;

constexpr uint64_t kPayload = 1 << 20;

class IncomingBatchTest : public testing::Test {
 protected:
  // A batch of these entries, all of which begin at the first byte of a payload of kPayload bytes.
  Result<std::unique_ptr<Batch>> receive(std::vector<TensorEntry> entries) {
    const auto count = static_cast<uint32_t>(entries.size());
    const auto nest = wire::nest_of_tensors(count);
    const auto record = wire::write_frame(
        {.tensors = std::move(entries), .boundary_keys = {}, .nest = nest, .payload_bytes = kPayload});
    IncomingBatch batch(memory_, kPayload + record.size());
    const auto room = batch.room_for(0, kPayload + record.size());
    EXPECT_EQ(room.size(), kPayload + record.size());
    std::fill(room.begin(), room.end(), std::byte{0});
    std::copy(record.begin(), record.end(), room.begin() + kPayload);
    batch.add(room.size());
    return batch.finish({}, static_cast<uint32_t>(record.size()), /*allow_pickle=*/false);
  }

  static TensorEntry whole_payload() { return make_entry(wire::kDTypeUInt8, {kPayload}); }
  // 63 times the payload, once it is widened.
  static TensorEntry narrow() {
    TensorEntry entry = make_entry(wire::kDTypeUInt8, {63, kPayload});
    entry.encoding = Encoding::kRows;
    entry.bytes = kPayload;
    return entry;
  }

  BatchMemory memory_{1 << 26};
};

TEST_F(IncomingBatchTest, TensorsThatShareBytesComeTo64TimesTheBatchAtMost) {
  EXPECT_TRUE(receive(std::vector<TensorEntry>(64, whole_payload())));
  const auto refused = receive(std::vector<TensorEntry>(65, whole_payload()));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kTooLarge);
  EXPECT_NE(refused.error().message.find("at most 64 times as many are accepted"), std::string::npos)
      << refused.error().message;
}

// Tensors that were written narrow and tensors that share bytes had a bound each, and a batch could come to both.
TEST_F(IncomingBatchTest, WidenedAndSharedBytesHaveOneBoundTogether) {
  EXPECT_TRUE(receive({narrow()}));
  EXPECT_TRUE(receive(std::vector<TensorEntry>(10, whole_payload())));
  std::vector<TensorEntry> both(10, whole_payload());
  both.push_back(narrow());
  EXPECT_EQ(receive(std::move(both)).error().code, Errc::kTooLarge);
}

// As a tensor that was expanded: it takes no memory, unless a program copies it.
TEST_F(IncomingBatchTest, ElementsThatStridesRepeatAreAsManyAsABatchMayHaveWithout) {
  const auto expanded = [](int64_t count) { return make_entry(wire::kDTypeFloat32, {count}, {0}); };
  constexpr int64_t kMost = wire::kElementBytesMax / 4;
  const auto batch = receive({expanded(kMost)});
  ASSERT_TRUE(batch) << batch.error().message;
  const at::Tensor tensor = batch.value()->tensors().all().at(0);
  EXPECT_EQ(tensor.numel(), kMost);
  EXPECT_EQ(tensor.storage().nbytes(), 4u);
  EXPECT_EQ(receive({expanded(kMost + 1)}).error().code, Errc::kTooLarge);
  EXPECT_EQ(receive({expanded(kMost / 2 + 1), expanded(kMost / 2)}).error().code, Errc::kTooLarge) << "together";
  EXPECT_EQ(receive({expanded(int64_t{1} << 40)}).error().code, Errc::kTooLarge);
}

// A worker could write to its slab after the bytes were checked, and the batch was an error that no other worker made
// good.
TEST_F(IncomingBatchTest, NarrowBytesThatWereCheckedAreThoseThatAreWidened) {
  std::mt19937_64 random(1);
  const auto sample = wire::random_narrow(Encoding::kRows, 10, random);
  const auto record = wire::make_record({sample.entry}, wire::nest_of_tensors(1));
  const uint64_t record_begin = align_up(sample.narrow.size(), wire::kPayloadAlignment);
  auto slab = memory_.take(record_begin + record.size()).value();
  const auto lease = slab.lease;
  std::copy(sample.narrow.begin(), sample.narrow.end(), lease->data());
  std::copy(record.begin(), record.end(), lease->data() + record_begin);
  IncomingBatch incoming(std::move(slab), record_begin + record.size());
  auto batch = incoming.finish({}, static_cast<uint32_t>(record.size()), /*allow_pickle=*/false);
  ASSERT_TRUE(batch) << batch.error().message;
  ASSERT_TRUE(batch.value()->tensors().check_narrow());
  std::fill_n(lease->data(), record_begin, std::byte{0xff});
  const auto widened = batch.value()->tensors().widen(memory_);
  ASSERT_TRUE(widened) << widened.error().message;
  const auto expected = sample.widened();
  EXPECT_EQ(std::memcmp(batch.value()->tensors().all().at(0).const_data_ptr(), expected.data(), expected.size()), 0);
}

}  // namespace
}  // namespace penstock::loader
