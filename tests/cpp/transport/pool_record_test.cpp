// SPDX-License-Identifier: Apache-2.0
#include "transport/pool_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace penstock::transport {
namespace {

using cluster::ToTrainer;
using cluster::ToWorker;

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

class PoolRecord : public testing::Test {
 protected:
  PoolRequest request() const {
    return {.message = {.kind = ToWorker::Kind::kRequest,
                        .trainer_id = 0x0102030405060708,
                        .link = 9,
                        .stamp = 10,
                        .key = {.epoch = 11, .sequence = 12},
                        .lane = 13,
                        .is_lane_start = true},
            .index_kind = IndexKind::kIntegers,
            .epoch_seed = 14,
            .indices = indices_,
            .state = state_};
  }
  PoolAnswer answer() const {
    return {.message = {.kind = ToTrainer::Kind::kAnswer, .link = 9, .stamp = 10, .key = {.epoch = 11, .sequence = 12}},
            .worker_id = 13,
            .incarnation = 14,
            .kind = AnswerKind::kBatch,
            .flags = kDescriptorHasState,
            .payload_bytes = 1000,
            .fetch_time = 15,
            .prefix_time = 16,
            .body = state_};
  }
  PoolAnswer piece() const {
    auto piece = answer();
    piece.message.kind = ToTrainer::Kind::kPiece;
    piece.kind = AnswerKind::kNone;
    piece.payload_offset = 900;
    piece.body = {};
    return piece;
  }

  std::vector<std::byte> indices_ = bytes_of("sixteen bytes...");
  std::vector<std::byte> state_ = bytes_of("a state");
};

TEST_F(PoolRecord, RequestComesBackWithItsIndicesAndItsState) {
  const auto part = write_to_worker(request());
  ASSERT_EQ(part.size(), kPoolHeadBytes + indices_.size() + state_.size());
  const auto parsed = parse_to_worker(part);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed.value().message, request().message);
  EXPECT_EQ(parsed.value().index_kind, IndexKind::kIntegers);
  EXPECT_EQ(parsed.value().epoch_seed, 14u);
  EXPECT_TRUE(std::ranges::equal(parsed.value().indices, indices_));
  EXPECT_TRUE(std::ranges::equal(parsed.value().state, state_));
}

TEST_F(PoolRecord, EveryKindComesBack) {
  for (uint8_t kind = 1; kind <= static_cast<uint8_t>(ToWorker::Kind::kBye); ++kind) {
    const PoolRequest sent{
        .message = {.kind = static_cast<ToWorker::Kind>(kind), .trainer_id = 1, .is_continued = true}};
    const auto part = write_to_worker(sent);
    ASSERT_TRUE(parse_to_worker(part));
    EXPECT_EQ(parse_to_worker(part).value().message, sent.message);
  }
  for (uint8_t kind = 1; kind <= static_cast<uint8_t>(ToTrainer::Kind::kPiece); ++kind) {
    PoolAnswer sent{.message = {.kind = static_cast<ToTrainer::Kind>(kind), .is_fresh = true}, .payload_bytes = 5};
    if (sent.message.kind == ToTrainer::Kind::kAnswer) sent.kind = AnswerKind::kEnd;
    const auto part = write_to_trainer(sent);
    const auto parsed = parse_to_trainer(part, sent.message.kind == ToTrainer::Kind::kPiece ? 5 : 0);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value().message, sent.message);
  }
}

TEST_F(PoolRecord, AnswerComesBack) {
  const auto part = write_to_trainer(answer());
  const auto parsed = parse_to_trainer(part, 0);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed.value().message, answer().message);
  EXPECT_EQ(parsed.value().worker_id, 13u);
  EXPECT_EQ(parsed.value().incarnation, 14u);
  EXPECT_EQ(parsed.value().flags, kDescriptorHasState);
  EXPECT_EQ(parsed.value().payload_bytes, 1000u);
  EXPECT_EQ(parsed.value().fetch_time, 15u);
  EXPECT_EQ(parsed.value().prefix_time, 16u);
  EXPECT_TRUE(std::ranges::equal(parsed.value().body, state_));
}

TEST_F(PoolRecord, PieceOutsideOfItsBatchIsRefused) {
  const auto part = write_to_trainer(piece());
  EXPECT_TRUE(parse_to_trainer(part, 100));
  EXPECT_FALSE(parse_to_trainer(part, 101));
  EXPECT_FALSE(parse_to_trainer(part, uint64_t{1} << 63));
  EXPECT_FALSE(parse_to_trainer(part, 0));
  EXPECT_FALSE(parse_to_trainer(write_to_trainer(answer()), 100));
}

TEST_F(PoolRecord, BatchAboveTheCapIsRefused) {
  auto large = answer();
  large.payload_bytes = kPoolPayloadBytesMax + 1;
  EXPECT_EQ(parse_to_trainer(write_to_trainer(large), 0).error().code, Errc::kTooLarge);
}

TEST_F(PoolRecord, TruncatedAndLengthenedMessagesAreRefused) {
  auto to_worker = write_to_worker(request());
  for (size_t size = 0; size < to_worker.size(); ++size)
    ASSERT_FALSE(parse_to_worker(std::span(to_worker).first(size))) << size;
  to_worker.push_back({});
  EXPECT_FALSE(parse_to_worker(to_worker));
  auto to_trainer = write_to_trainer(answer());
  for (size_t size = 0; size < to_trainer.size(); ++size)
    ASSERT_FALSE(parse_to_trainer(std::span(to_trainer).first(size), 0)) << size;
  to_trainer.push_back({});
  EXPECT_FALSE(parse_to_trainer(to_trainer, 0));
}

TEST_F(PoolRecord, FlippedBitIsRefusedOrSeen) {
  const auto to_worker = write_to_worker(request());
  for (size_t bit = 0; bit < 8 * kPoolHeadBytes; ++bit) {
    auto flipped = to_worker;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = parse_to_worker(flipped);
    if (!parsed) continue;
    EXPECT_EQ(write_to_worker(parsed.value()), flipped);
  }
  const auto to_trainer = write_to_trainer(answer());
  for (size_t bit = 0; bit < 8 * kPoolHeadBytes; ++bit) {
    auto flipped = to_trainer;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = parse_to_trainer(flipped, 0);
    if (!parsed) continue;
    EXPECT_EQ(write_to_trainer(parsed.value()), flipped);
  }
}

TEST_F(PoolRecord, AnotherVersionIsAMismatchThatNamesBoth) {
  auto part = write_to_worker(request());
  part[4] = std::byte{7};
  const auto parsed = parse_to_worker(part);
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Errc::kMismatch);
  EXPECT_NE(parsed.error().message.find("version 7"), std::string::npos);
}

}  // namespace
}  // namespace penstock::transport
