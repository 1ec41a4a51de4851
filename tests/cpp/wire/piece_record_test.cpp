// SPDX-License-Identifier: Apache-2.0
#include "wire/piece_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace penstock::wire {
namespace {

class PieceRecord : public testing::Test {
 protected:
  static std::vector<std::byte> message(const PieceHead& head, size_t sealed_bytes) {
    const auto bytes = write_piece_head(head);
    std::vector<std::byte> message(bytes.begin(), bytes.end());
    message.resize(message.size() + sealed_bytes, std::byte{9});
    return message;
  }

  const PieceHead piece_{.sender = 0x0102030405060708,
                         .link = 9,
                         .counter = 10,
                         .key = {.epoch = 11, .sequence = 12},
                         .payload_bytes = 1000,
                         .payload_offset = 900};
  const PieceHead join_{.kind = PieceHead::Kind::kJoin, .sender = 7, .link = 9, .counter = 1};
};

TEST_F(PieceRecord, PieceComesBack) {
  const auto bytes = message(piece_, 100 + kSealTagBytes);
  const auto parsed = parse_piece(bytes);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed.value().head, piece_);
  EXPECT_EQ(parsed.value().size(), 100u);
  EXPECT_EQ(parsed.value().head_bytes.data(), bytes.data());
  EXPECT_EQ(parsed.value().sealed.data(), bytes.data() + kPieceHeadBytes);
}

TEST_F(PieceRecord, PieceOutsideOfItsBatchIsRefused) {
  EXPECT_TRUE(parse_piece(message(piece_, 1 + kSealTagBytes)));
  EXPECT_TRUE(parse_piece(message(piece_, 100 + kSealTagBytes)));
  EXPECT_FALSE(parse_piece(message(piece_, 101 + kSealTagBytes)));
  EXPECT_FALSE(parse_piece(message(piece_, kSealTagBytes)));
  auto beyond = piece_;
  beyond.payload_offset = ~uint64_t{0} - 50;
  EXPECT_FALSE(parse_piece(message(beyond, 100 + kSealTagBytes)));
}

TEST_F(PieceRecord, PieceOrBatchAboveItsCapIsTooLarge) {
  auto large = piece_;
  large.payload_bytes = kPoolPayloadBytesMax;
  large.payload_offset = kPoolPayloadBytesMax - kPieceBytesMax;
  EXPECT_TRUE(parse_piece(message(large, kPieceBytesMax + kSealTagBytes)));
  EXPECT_EQ(parse_piece(message(large, kPieceBytesMax + 1 + kSealTagBytes)).error().code, Errc::kTooLarge);
  ++large.payload_bytes;
  EXPECT_EQ(parse_piece(message(large, 100 + kSealTagBytes)).error().code, Errc::kTooLarge);
}

TEST_F(PieceRecord, JoinHasNothingOfABatch) {
  EXPECT_TRUE(parse_piece(message(join_, kSealTagBytes)));
  EXPECT_FALSE(parse_piece(message(join_, kSealTagBytes + 1)));
  auto other = join_;
  other.payload_bytes = 1;
  EXPECT_FALSE(parse_piece(message(other, kSealTagBytes)));
  other = join_;
  other.key.sequence = 1;
  EXPECT_FALSE(parse_piece(message(other, kSealTagBytes)));
}

TEST_F(PieceRecord, TruncatedMessagesAreRefused) {
  const auto bytes = message(piece_, kSealTagBytes);
  for (size_t size = 0; size < bytes.size(); ++size) ASSERT_FALSE(parse_piece(std::span(bytes).first(size))) << size;
}

TEST_F(PieceRecord, FlippedBitIsRefusedOrSeen) {
  const auto bytes = message(piece_, 100 + kSealTagBytes);
  for (size_t bit = 0; bit < 8 * kPieceHeadBytes; ++bit) {
    auto flipped = bytes;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto parsed = parse_piece(flipped);
    if (!parsed) continue;
    EXPECT_TRUE(std::ranges::equal(write_piece_head(parsed.value().head), std::span(flipped).first(kPieceHeadBytes)));
  }
}

TEST_F(PieceRecord, AnotherVersionIsAMismatchThatNamesBoth) {
  auto bytes = message(piece_, 100 + kSealTagBytes);
  bytes[4] = std::byte{7};
  const auto parsed = parse_piece(bytes);
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Errc::kMismatch);
  EXPECT_NE(parsed.error().message.find("version 7"), std::string::npos);
}

}  // namespace
}  // namespace penstock::wire
