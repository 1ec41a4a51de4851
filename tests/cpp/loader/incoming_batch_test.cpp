// SPDX-License-Identifier: Apache-2.0
#include "loader/incoming_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

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
  EXPECT_NE(refused.error().message.find("at most 64 times as many are taken"), std::string::npos)
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
  const at::Tensor tensor = batch.value()->tensors().at(0);
  EXPECT_EQ(tensor.numel(), kMost);
  EXPECT_EQ(tensor.storage().nbytes(), 4u);
  EXPECT_EQ(receive({expanded(kMost + 1)}).error().code, Errc::kTooLarge);
  EXPECT_EQ(receive({expanded(kMost / 2 + 1), expanded(kMost / 2)}).error().code, Errc::kTooLarge) << "together";
  EXPECT_EQ(receive({expanded(int64_t{1} << 40)}).error().code, Errc::kTooLarge);
}

}  // namespace
}  // namespace penstock::loader
