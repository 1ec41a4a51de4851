// SPDX-License-Identifier: Apache-2.0
#include "wire/blob_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "record_samples.h"
#include "wire/pool_record.h"
#include "with.h"

namespace penstock::wire {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// The SHA-256 of "abc".
constexpr std::array<uint8_t, 32> kDigest{0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40,
                                          0xde, 0x5d, 0xae, 0x22, 0x23, 0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17,
                                          0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad};

BlobId digest() {
  BlobId id;
  std::memcpy(id.data(), kDigest.data(), sizeof id);
  return id;
}

struct Sample {
  BlobMessage message;
  uint64_t piece_bytes;
};

std::vector<Sample> samples() {
  return {{BlobRequest{.id = digest(), .offset = 4 * kMiB}, 0},
          {BlobPiece{.id = digest(), .offset = 4 * kMiB, .total_bytes = 5 * kMiB}, kBlobPieceBytesMax},
          {BlobUnknown{.id = digest()}, 0}};
}

bool is_taken(const BlobPiece& piece, uint64_t piece_bytes) {
  return bool(parse_blob_message(write_blob_message(piece), piece_bytes));
}

TEST(BlobRecord, EveryMessageComesBack) {
  ASSERT_EQ(samples().size(), std::variant_size_v<BlobMessage>);
  for (const auto& [message, piece_bytes] : samples()) {
    const auto part = write_blob_message(message);
    EXPECT_EQ(part.size(), kBlobRecordBytes);
    const auto parsed = parse_blob_message(part, piece_bytes);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value(), message);
  }
}

TEST(BlobRecord, HasTheBytesOfTheSpecification) {
  std::vector<uint8_t> expected{0x50, 0x4e, 0x42, 0x31, 1, 0, 1, 0};  // PNB1, version 1, a wish
  expected.insert(expected.end(), kDigest.begin(), kDigest.end());
  expected.insert(expected.end(), {2, 0, 0, 0, 0, 0, 0, 0});  // the piece that begins at byte 2
  expected.resize(kBlobRecordBytes);
  const auto part = write_blob_message(BlobRequest{.id = digest(), .offset = 2});
  ASSERT_EQ(part.size(), expected.size());
  EXPECT_EQ(std::memcmp(part.data(), expected.data(), expected.size()), 0);
}

TEST(BlobRecord, IsToldFromTheOtherMessagesOfAPool) {
  for (const auto& [message, piece_bytes] : samples()) EXPECT_TRUE(is_blob_message(write_blob_message(message)));
  EXPECT_FALSE(is_blob_message(write_to_worker({.message = {.trainer_id = 1}})));
  EXPECT_FALSE(is_blob_message(write_to_trainer({})));
  const auto wish = write_blob_message(BlobRequest{});
  EXPECT_FALSE(is_blob_message(std::span(wish).first(3)));
  EXPECT_FALSE(is_blob_message({}));
}

TEST(BlobRecord, EveryTruncationAndEveryAppendedByteIsRefused) {
  for (const auto& [message, piece_bytes] : samples()) {
    auto part = write_blob_message(message);
    for (size_t size = 0; size < part.size(); ++size) {
      const auto parsed = parse_blob_message(std::span(part).first(size), piece_bytes);
      ASSERT_FALSE(parsed) << size;
      EXPECT_EQ(parsed.error().code, Errc::kMalformed);
    }
    part.push_back(std::byte{0});
    EXPECT_FALSE(parse_blob_message(part, piece_bytes));
  }
}

TEST(BlobRecord, FlippedBitIsRefusedOrSeen) {
  for (const auto& [message, piece_bytes] : samples()) {
    const auto part = write_blob_message(message);
    for (size_t bit = 0; bit < 8 * part.size(); ++bit) {
      auto flipped = part;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      const auto parsed = parse_blob_message(flipped, piece_bytes);
      if (!parsed) continue;
      EXPECT_NE(parsed.value(), message) << bit;
      EXPECT_EQ(write_blob_message(parsed.value()), flipped) << bit;
    }
  }
}

TEST(BlobRecord, PieceOutsideOfItsBlobIsRefused) {
  const BlobPiece piece{.id = digest(), .offset = 90, .total_bytes = 100};
  EXPECT_TRUE(is_taken(piece, 9));
  EXPECT_TRUE(is_taken(piece, 10));
  EXPECT_FALSE(is_taken(piece, 11));
  EXPECT_FALSE(is_taken(piece, ~uint64_t{0} - 80));  // offset and size wrap around to 9
  EXPECT_FALSE(is_taken({.id = digest(), .offset = 100, .total_bytes = 100}, 1));
  EXPECT_FALSE(is_taken({.id = digest(), .offset = 101, .total_bytes = 100}, 1));
  EXPECT_FALSE(is_taken({.id = digest()}, 1));
}

TEST(BlobRecord, PieceAndItsBytesComeTogether) {
  for (const auto& [message, piece_bytes] : samples())
    EXPECT_FALSE(parse_blob_message(write_blob_message(message), piece_bytes == 0 ? 1 : 0));
}

TEST(BlobRecord, WhatIsAboveACapIsRefused) {
  const BlobPiece last{.id = digest(), .offset = kBlobBytesMax - kBlobPieceBytesMax, .total_bytes = kBlobBytesMax};
  EXPECT_TRUE(is_taken(last, kBlobPieceBytesMax));
  EXPECT_FALSE(is_taken({.id = digest(), .total_bytes = kBlobBytesMax}, kBlobPieceBytesMax + 1));
  EXPECT_FALSE(is_taken({.id = digest(), .total_bytes = kBlobBytesMax + 1}, 1));
  EXPECT_TRUE(parse_blob_message(write_blob_message(BlobRequest{.id = digest(), .offset = kBlobBytesMax - 1}), 0));
  EXPECT_FALSE(parse_blob_message(write_blob_message(BlobRequest{.id = digest(), .offset = kBlobBytesMax}), 0));
}

TEST(BlobRecord, AnotherVersionIsAMismatchThatNamesBoth) {
  const auto parsed = parse_blob_message(with<uint16_t>(write_blob_message(BlobRequest{}), 4, 7), 0);
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Errc::kMismatch);
  EXPECT_NE(parsed.error().message.find("version 7"), std::string::npos);
  EXPECT_NE(parsed.error().message.find("version 1"), std::string::npos);
}

TEST(BlobRecord, UnknownKindIsRefused) {
  for (const uint8_t kind : {uint8_t{0}, uint8_t{4}, uint8_t{255}})
    EXPECT_FALSE(parse_blob_message(with(write_blob_message(BlobRequest{}), 6, kind), 0));
}

TEST(BlobRecord, IdsAreReadWhereTheyLie) {
  const std::vector<BlobId> ids{digest(), BlobId{std::byte{1}}};
  const auto read = blob_ids(std::as_bytes(std::span(ids)));
  EXPECT_TRUE(std::ranges::equal(read, ids));
  EXPECT_EQ(static_cast<const void*>(read.data()), ids.data());
  EXPECT_TRUE(blob_ids({}).empty());
}

std::string key(char letter) { return std::string(32, letter); }

const Shipment kSample{
    .boundary_keys = {{key('a'), key('b')}, {key('c')}}, .withheld = {0, 3, 70'000 % 65'536}, .whole_every = 1000};

TEST(ShipmentTest, IsReadAsItWasWritten) {
  for (const Shipment& shipment : {kSample, Shipment{}, Shipment{.boundary_keys = {{key('x')}}, .withheld = {}}}) {
    const auto bytes = write_shipment(shipment);
    EXPECT_TRUE(is_shipment(bytes));
    const auto parsed = parse_shipment(bytes);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value(), shipment);
  }
}

TEST(ShipmentTest, EveryTruncationIsRefused) {
  const auto bytes = write_shipment(kSample);
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(parse_shipment(std::span(bytes).first(size))) << size;
  auto longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(parse_shipment(longer));
}

TEST(ShipmentTest, DamageIsRefusedOrReadAsAnotherOne) {
  std::mt19937 random(7);
  const auto sample = write_shipment(kSample);
  for (int round = 0; round < 20'000; ++round) {
    auto bytes = sample;
    for (unsigned change = 0; change <= random() % 3; ++change)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    const auto parsed = parse_shipment(bytes);
    if (parsed) {
      EXPECT_EQ(write_shipment(parsed.value()), bytes);
    }
  }
}

TEST(ShipmentTest, IsToldFromAPrefix) {
  EXPECT_FALSE(is_shipment({}));
  const std::vector<std::byte> prefix(64, std::byte{1});
  EXPECT_FALSE(is_shipment(prefix));
}

// A body with all that there is, whose constants are bytes counted up from 0.
class PrefixBodies : public testing::Test {
 protected:
  PrefixBodies() : numbers_(64) {
    for (size_t index = 0; index < numbers_.size(); ++index) numbers_[index] = static_cast<std::byte>(index);
    body_ = {.text = "penstock-ir 1\n",
             .seed = 0xfedcba9876543210,
             .library = "library",
             .library_leaves = {{.leaf_index = 2, .dtype = kDTypeUInt8, .sizes = {3, 4}, .strides = {4, 1}}},
             .constants = {constant(make_entry(kDTypeFloat32, {5})), constant(make_entry(kDTypeUInt8, {0, 3})),
                           constant(make_entry(kDTypeUInt8, {64}))},
             .numerics = {3, 4, 5},
             .settings = {.flushes_denormals = true, .matmul_precision = 3}};
  }

  PrefixConstant constant(const TensorEntry& entry) const {
    return {.entry = entry, .bytes = std::span(numbers_).first(entry.bytes)};
  }

  std::vector<std::byte> numbers_;
  PrefixBody body_;
};

TEST_F(PrefixBodies, WhatIsWrittenIsReadTheSame) {
  const auto bytes = write_prefix_body(body_);
  const auto read = parse_prefix_body(bytes);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read.value().text, body_.text);
  EXPECT_EQ(read.value().seed, body_.seed);
  EXPECT_EQ(read.value().library, body_.library);
  EXPECT_EQ(read.value().library_leaves, body_.library_leaves);
  EXPECT_EQ(read.value().numerics, body_.numerics);
  EXPECT_EQ(read.value().settings, body_.settings);
  ASSERT_EQ(read.value().constants.size(), body_.constants.size());
  for (size_t index = 0; index < body_.constants.size(); ++index) {
    EXPECT_EQ(read.value().constants[index].entry.shape, body_.constants[index].entry.shape);
    EXPECT_TRUE(std::ranges::equal(read.value().constants[index].bytes, body_.constants[index].bytes));
  }
}

TEST_F(PrefixBodies, EveryTruncationAndEveryByteMoreIsAnError) {
  auto bytes = write_prefix_body(body_);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(parse_prefix_body(std::span(bytes).first(length))) << length << " of " << bytes.size();
  }
  bytes.push_back(std::byte{0});
  EXPECT_EQ(parse_prefix_body(bytes).error().code, Errc::kMalformed);
}

TEST_F(PrefixBodies, ALeafThatNoBatchCanHoldIsMalformed) {
  for (const DTypeCode dtype : {DTypeCode{12}, DTypeCode{255}}) {  // a quantised type, and none at all
    body_.library_leaves[0].dtype = dtype;
    EXPECT_EQ(parse_prefix_body(write_prefix_body(body_)).error().code, Errc::kMalformed);
  }
  body_.library_leaves[0].dtype = kDTypeUInt8;
  body_.library_leaves[0].leaf_index = kTensorCountMax;
  EXPECT_EQ(parse_prefix_body(write_prefix_body(body_)).error().code, Errc::kMalformed);
}

TEST_F(PrefixBodies, ANestThatIsNoPrefixIsMalformed) {
  const auto record = make_record({}, nest_of_tensors(0));
  ByteWriter writer;
  writer.write(uint64_t{record.size()});
  writer.write_bytes(record);
  auto bytes = writer.take();
  bytes.resize(align_up(bytes.size(), kPayloadAlignment));
  EXPECT_EQ(parse_prefix_body(bytes).error().code, Errc::kMalformed);
}

}  // namespace
}  // namespace penstock::wire
