// SPDX-License-Identifier: Apache-2.0
#include "wire/prefix_body.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "record_samples.h"

namespace penstock::wire {
namespace {

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
