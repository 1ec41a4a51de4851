// SPDX-License-Identifier: Apache-2.0
#include "wire/store_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "with.h"

namespace penstock::wire {
namespace {

using StoreBytes = std::vector<std::byte>;

constexpr size_t kVersionAt = 4, kKindAt = 6, kFlagsAt = 7, kGroupBytesAt = 32, kComparisonAt = 48, kReservedAt = 49;
constexpr size_t kToPayloadBytesAt = 88, kToRecordBytesAt = 96, kToBatchFlagsAt = 120, kFromSparseAt = 7;

StoreBytes store_bytes(size_t count, char value) { return StoreBytes(count, static_cast<std::byte>(value)); }

TEST(StoreRecord, QuestionIsReadAsItWasWritten) {
  const auto text = store_bytes(9, 'n');
  const ToStore written{.kind = ToStore::Kind::kAdmit,
                        .comparison = ToStore::Comparison::kDifferent,
                        .may_wait = true,
                        .draws_nothing = true,
                        .is_cheap = true,
                        .worker_id = 1,
                        .trainer_id = 2,
                        .number = 3,
                        .name = {.group = text, .samples = std::span(text).first(2), .epoch = {}, .place = text}};
  const auto bytes = write_to_store(written);
  const auto read = parse_to_store(bytes);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read.value().kind, written.kind);
  EXPECT_EQ(read.value().comparison, written.comparison);
  EXPECT_TRUE(read.value().may_wait && read.value().draws_nothing && read.value().is_cheap);
  EXPECT_FALSE(read.value().is_ahead || read.value().is_for_wakes);
  EXPECT_TRUE(std::ranges::equal(read.value().name.group, text));
  EXPECT_TRUE(std::ranges::equal(read.value().name.samples, std::span(text).first(2)));
  EXPECT_TRUE(read.value().name.epoch.empty());
  EXPECT_EQ(write_to_store(read.value()), bytes);
}

TEST(StoreRecord, HelloHasItsNonceAndItsProof) {
  const ToStore written{.kind = ToStore::Kind::kHello,
                        .is_for_wakes = true,
                        .number = 5,
                        .nonce = {std::byte{1}},
                        .proof = {std::byte{2}}};
  const auto read = parse_to_store(write_to_store(written));
  ASSERT_TRUE(read);
  EXPECT_EQ(read.value().nonce, written.nonce);
  EXPECT_EQ(read.value().proof, written.proof);
  EXPECT_TRUE(read.value().is_for_wakes);
  auto cut = write_to_store(written);
  cut.pop_back();
  EXPECT_FALSE(parse_to_store(cut));
}

TEST(StoreRecord, SmallBatchFollowsAndALargeOneDoesNot) {
  const auto small = store_bytes(kStoreInlineBytesMax, 'b');
  const StoreBatch batch{.flags = kBatchDatasetStays,
                         .cpu_share = 4,
                         .fetch_time = 5,
                         .prefix_time = 6,
                         .samples = {.dataset_time = 7, .slowest_place = 1, .slowest_share = 2},
                         .sample_count = 8,
                         .dataset_size = 9,
                         .record_bytes = 10,
                         .payload_bytes = small.size(),
                         .payload = small};
  const auto bytes = write_from_store({.kind = FromStore::Kind::kKept, .is_sparse = true, .batch = batch});
  const auto read = parse_from_store(bytes);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(std::ranges::equal(read.value().batch->payload, small));
  EXPECT_EQ(read.value().batch->dataset_size, 9u);
  EXPECT_EQ(read.value().batch->samples.slowest_share, 2);
  EXPECT_EQ(write_from_store(read.value()), bytes);

  StoreBatch large = batch;
  large.payload_bytes = kStoreInlineBytesMax + 1;
  large.payload = {};
  const auto of_file = write_to_store({.kind = ToStore::Kind::kSettle, .batch = large});
  ASSERT_TRUE(parse_to_store(of_file));
  EXPECT_EQ(of_file.size(), kToStoreHeadBytes);
  auto longer = of_file;
  longer.push_back(std::byte{});
  EXPECT_FALSE(parse_to_store(longer)) << "its bytes are in a file";
}

TEST(StoreRecord, EveryTruncationIsAnError) {
  const auto text = store_bytes(20, 'n');
  const StoreBatch batch{.record_bytes = 3, .payload_bytes = text.size(), .payload = text};
  const auto asked = write_to_store({.kind = ToStore::Kind::kAsk, .name = {.group = text, .place = text}});
  const auto settled = write_to_store({.kind = ToStore::Kind::kSettle, .batch = batch});
  const auto kept = write_from_store({.kind = FromStore::Kind::kKept, .batch = batch});
  for (size_t length = 0; length < settled.size(); ++length)
    EXPECT_FALSE(parse_to_store(std::span(settled).first(length))) << length;
  for (size_t length = 0; length < kept.size(); ++length)
    EXPECT_FALSE(parse_from_store(std::span(kept).first(length))) << length;
  for (size_t length = 0; length < asked.size(); ++length)
    EXPECT_FALSE(parse_to_store(std::span(asked).first(length))) << length;
}

TEST(StoreRecord, WrongFieldsAreRefused) {
  const auto text = store_bytes(20, 'n');
  const StoreBatch batch{.record_bytes = 3, .payload_bytes = text.size(), .payload = text};
  const auto ask = write_to_store({.kind = ToStore::Kind::kAsk, .name = {.group = text}});
  const auto settle = write_to_store({.kind = ToStore::Kind::kSettle, .batch = batch});
  const auto wake = write_from_store({.kind = FromStore::Kind::kWake});
  for (const auto& wrong :
       {with<uint8_t>(ask, kKindAt, 0), with<uint8_t>(ask, kKindAt, 12), with<uint8_t>(ask, kFlagsAt, 32),
        with<uint8_t>(ask, kComparisonAt, 4), with<uint8_t>(ask, kReservedAt, 1), with<uint64_t>(ask, 56, 1),
        with<uint8_t>(ask, kKindAt, static_cast<uint8_t>(ToStore::Kind::kCount)),
        with<uint32_t>(ask, kGroupBytesAt, kStoreNameBytesMax + 1), with<uint32_t>(ask, kGroupBytesAt, 21),
        with<uint64_t>(ask, kToPayloadBytesAt, 1), with<uint32_t>(settle, kToRecordBytesAt, 0),
        with<uint32_t>(settle, kToRecordBytesAt, 21), with<uint64_t>(settle, kToPayloadBytesAt, 19),
        with<uint8_t>(settle, kToBatchFlagsAt, 2)}) {
    const auto read = parse_to_store(wrong);
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code, Errc::kMalformed) << read.error().message;
  }
  EXPECT_TRUE(parse_from_store(wake));
  EXPECT_FALSE(parse_from_store(with<uint8_t>(wake, kFromSparseAt, 2)));
  EXPECT_FALSE(parse_from_store(with<uint8_t>(wake, kKindAt, 10)));
}

TEST(StoreRecord, AnotherVersionIsAMismatch) {
  const auto wake = write_from_store({.kind = FromStore::Kind::kWake});
  EXPECT_EQ(parse_from_store(with<uint16_t>(wake, kVersionAt, kStoreVersion + 1)).error().code, Errc::kMismatch);
  const auto ask = write_to_store({.kind = ToStore::Kind::kAsk});
  EXPECT_EQ(parse_to_store(with<uint16_t>(ask, kVersionAt, kStoreVersion + 1)).error().code, Errc::kMismatch);
}

}  // namespace
}  // namespace penstock::wire
