// SPDX-License-Identifier: Apache-2.0
#include "wire/packed_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "record_samples.h"

namespace penstock::wire {
namespace {

class PackedRecords : public testing::Test {
 protected:
  PackedRecords() : numbers_(200), nest_(nest_of_tensors(3)) {
    for (size_t index = 0; index < numbers_.size(); ++index) numbers_[index] = static_cast<std::byte>(index);
    frame_ = {
        .tensors = {make_entry(kDTypeFloat32, {5}), make_entry(kDTypeUInt8, {0, 3}), make_entry(kDTypeUInt8, {130})},
        .boundary_keys = {},
        .nest = nest_};
    sources_ = {source(0, 20), source(20, 0), source(20, 130)};
  }

  std::span<const std::byte> source(size_t begin, size_t count) const {
    return std::span(numbers_).subspan(begin, count);
  }

  std::vector<std::byte> numbers_;
  std::vector<std::byte> nest_;
  Frame frame_;
  std::vector<std::span<const std::byte>> sources_;
};

TEST_F(PackedRecords, WhatIsWrittenIsReadTheSame) {
  const auto bytes = write_packed_record(frame_, sources_);
  const auto read = parse_packed_record(bytes);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(std::ranges::equal(read.value().frame.nest, nest_));
  ASSERT_EQ(read.value().frame.tensors.size(), 3u);
  for (size_t index = 0; index < 3; ++index) {
    const TensorEntry& entry = read.value().frame.tensors[index];
    EXPECT_EQ(entry.shape, frame_.tensors[index].shape);
    EXPECT_TRUE(std::ranges::equal(read.value().bytes_of(entry), sources_[index]));
  }
}

TEST_F(PackedRecords, EveryTruncationAndEveryByteMoreIsMalformed) {
  auto bytes = write_packed_record(frame_, sources_);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(parse_packed_record(std::span(bytes).first(length))) << length << " of " << bytes.size();
  }
  bytes.push_back(std::byte{0});
  EXPECT_EQ(parse_packed_record(bytes).error().code, Errc::kMalformed);
}

TEST_F(PackedRecords, TensorsThatShareBytesAreMalformed) {
  // A hundred tensors on the same bytes would be a hundred copies of them.
  Frame frame{.tensors = std::vector<TensorEntry>(100, make_entry(kDTypeUInt8, {64})),
              .boundary_keys = {},
              .nest = nest_,
              .payload_bytes = 64};
  const auto record = write_frame(frame);
  ByteWriter writer;
  writer.write(uint64_t{record.size()});
  writer.write_bytes(record);
  auto bytes = writer.take();
  bytes.resize(align_up(bytes.size(), kPayloadAlignment) + 64);
  const auto read = parse_packed_record(bytes);
  ASSERT_FALSE(read);
  EXPECT_NE(read.error().message.find("overlap"), std::string::npos) << read.error().message;
}

}  // namespace
}  // namespace penstock::wire
