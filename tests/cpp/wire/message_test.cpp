// SPDX-License-Identifier: Apache-2.0
#include "wire/message.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "with.h"

namespace penstock::wire {
namespace {

Request some_request() {
  return {.kind = RequestKind::kFetch,
          .index_kind = IndexKind::kIntegers,
          .sequence = 0x1122334455667788,
          .body_bytes = 16,
          .epoch = 7};
}

Descriptor some_descriptor() {
  return {.kind = DescriptorKind::kSlab,
          .flags = kDescriptorRaises | kDescriptorTransient,
          .sequence = 5,
          .epoch = 6,
          .worker_id = 7,
          .arena_id = 8,
          .slab_index = 9,
          .slab_generation = 10,
          .record_bytes = 11,
          .record_offset = 12,
          .slab_bytes = 13,
          .fetch_time = 14,
          .prefix_time = 15,
          .samples = {.dataset_time = 16, .slowest_place = 17, .slowest_share = 18}};
}

std::vector<std::byte> request_bytes(const Request& request = some_request()) {
  return write_message(request, std::vector<std::byte>(request.body_bytes));
}

template <typename Record>
bool is_same(const Record& left, const Record& right) {
  return std::memcmp(&left, &right, sizeof left) == 0;
}

TEST(Message, ARequestAndItsBodyComeBack) {
  const auto bytes = request_bytes();
  ASSERT_EQ(bytes.size(), sizeof(Request) + 16);
  EXPECT_TRUE(is_same(parse_request(bytes).value(), some_request()));
}

TEST(Message, ATimeStopsAtTheLargestNumber) {
  EXPECT_EQ(time_units(std::chrono::microseconds(1)), 10u);
  EXPECT_EQ(time_units(std::chrono::nanoseconds(-5)), 0u);
  EXPECT_EQ(time_units(std::chrono::hours(1)), std::numeric_limits<uint32_t>::max());
}

TEST(Message, ADescriptorComesBack) {
  EXPECT_TRUE(is_same(parse_descriptor(write_message(some_descriptor())).value(), some_descriptor()));
}

TEST(Message, FieldsLieWhereTheProtocolSays) {
  const auto request = request_bytes();
  EXPECT_EQ(std::memcmp(request.data(), "PNR1", 4), 0);
  EXPECT_EQ(request[6], std::byte{1});
  EXPECT_EQ(request[7], std::byte{2});
  EXPECT_EQ(request[8], std::byte{0x88});
  EXPECT_EQ(request[16], std::byte{16});
  EXPECT_EQ(request[24], std::byte{7});
  const auto descriptor = write_message(some_descriptor());
  EXPECT_EQ(std::memcmp(descriptor.data(), "PND1", 4), 0);
  EXPECT_EQ(descriptor[6], std::byte{2});
  EXPECT_EQ(descriptor[7], std::byte{3});
  const uint8_t expected[] = {5, 0, 0,  0, 0,  0, 0,  0, 6,  0, 0,  0, 7,  0, 0, 0, 8,  0, 0,  0, 9, 0,
                              0, 0, 10, 0, 0,  0, 11, 0, 0,  0, 12, 0, 0,  0, 0, 0, 0,  0, 13, 0, 0, 0,
                              0, 0, 0,  0, 14, 0, 0,  0, 15, 0, 0,  0, 16, 0, 0, 0, 17, 0, 18, 0};
  EXPECT_EQ(std::memcmp(descriptor.data() + 8, expected, sizeof expected), 0);
}

TEST(Message, EveryTruncationIsMalformed) {
  const auto request = request_bytes();
  for (size_t length = 0; length < request.size(); ++length) {
    const std::vector<std::byte> cut(request.begin(), request.begin() + static_cast<ptrdiff_t>(length));
    EXPECT_EQ(parse_request(cut).error().code, Errc::kMalformed) << length;
  }
  const auto descriptor = write_message(some_descriptor());
  for (size_t length = 0; length < descriptor.size(); ++length) {
    const std::vector<std::byte> cut(descriptor.begin(), descriptor.begin() + static_cast<ptrdiff_t>(length));
    EXPECT_EQ(parse_descriptor(cut).error().code, Errc::kMalformed) << length;
  }
}

TEST(Message, EveryBitFlipIsAnErrorOrAnotherRecordWithinItsLimits) {
  auto bytes = request_bytes();
  for (size_t bit = 0; bit < sizeof(Request) * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    if (const auto request = parse_request(bytes)) {
      EXPECT_GE(request.value().kind, RequestKind::kFetch);
      EXPECT_LE(request.value().kind, RequestKind::kEarlyEpoch);
      EXPECT_LE(request.value().index_kind, IndexKind::kPickle);
      EXPECT_EQ(request.value().body_bytes, 16u);
      EXPECT_EQ(request.value().reserved[0], 0u);
    }
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
  bytes = write_message(some_descriptor());
  for (size_t bit = 0; bit < sizeof(Descriptor) * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    if (const auto descriptor = parse_descriptor(bytes)) {
      EXPECT_GE(descriptor.value().kind, DescriptorKind::kHello);
      EXPECT_LE(descriptor.value().kind, DescriptorKind::kEnd);
      EXPECT_LE(descriptor.value().flags, kDescriptorFlags);
    }
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
}

TEST(Message, EveryReservedByteOfARequestMustBeZero) {
  for (size_t offset = 48; offset < sizeof(Request); ++offset) {
    EXPECT_EQ(parse_request(with<uint8_t>(request_bytes(), offset, 1)).error().code, Errc::kMalformed) << offset;
  }
}

TEST(Message, AnotherVersionIsMalformed) {
  EXPECT_EQ(parse_request(with<uint16_t>(request_bytes(), 4, kMessageVersion + 1)).error().code, Errc::kMalformed);
  EXPECT_EQ(parse_descriptor(with<uint16_t>(write_message(some_descriptor()), 4, kMessageVersion + 1)).error().code,
            Errc::kMalformed);
}

TEST(Message, ABodyAboveTheCapIsTooLarge) {
  EXPECT_EQ(parse_request(with<uint64_t>(request_bytes(), 16, kRequestBodyBytesMax + 1)).error().code, Errc::kTooLarge);
}

TEST(Message, IndicesThatAreNotEightBytesEachAreMalformed) {
  Request request = some_request();
  request.body_bytes = 15;
  EXPECT_EQ(parse_request(request_bytes(request)).error().code, Errc::kMalformed);
  request.index_kind = IndexKind::kInteger;
  request.body_bytes = 16;
  EXPECT_EQ(parse_request(request_bytes(request)).error().code, Errc::kMalformed);
}

TEST(Message, ABodyFollowsOnlyWhereTheKindHasOne) {
  Descriptor descriptor = some_descriptor();
  descriptor.record_bytes = 3;
  const std::vector<std::byte> body(5);
  for (const auto kind : {DescriptorKind::kHello, DescriptorKind::kSlab}) {
    descriptor.kind = kind;
    EXPECT_EQ(parse_descriptor(write_message(descriptor, body)).error().code, Errc::kMalformed);
  }
  for (const auto kind : {DescriptorKind::kEnd, DescriptorKind::kStates}) {
    descriptor.kind = kind;
    EXPECT_TRUE(parse_descriptor(write_message(descriptor, body)));
    EXPECT_TRUE(parse_descriptor(write_message(descriptor)));
  }
}

TEST(Message, AnInlineDescriptorHasItsRecordAndAnyPayloadBehindIt) {
  Descriptor descriptor = some_descriptor();
  descriptor.kind = DescriptorKind::kInline;
  descriptor.record_bytes = 3;
  for (const size_t size : {size_t{3}, size_t{10}})
    EXPECT_TRUE(parse_descriptor(write_message(descriptor, std::vector<std::byte>(size)))) << size;
  EXPECT_EQ(parse_descriptor(write_message(descriptor, std::vector<std::byte>(2))).error().code, Errc::kMalformed);
}

}  // namespace
}  // namespace penstock::wire
