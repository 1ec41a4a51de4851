// SPDX-License-Identifier: Apache-2.0
// The parsers of records on bytes that were cut short or changed: they give an error, or a result that is safe to
// follow, and never allocate more than the bytes that they were given justify.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "../base/seeded_test.h"
#include "../base/watched_new.h"
#include "record_samples.h"

namespace penstock::wire {
namespace {

constexpr size_t kMessageBytesMax = 1024;  // an error's sentence

// A copy in an allocation of exactly its size, so that a read past it is seen by the address sanitizer.
class ExactCopy {
 public:
  explicit ExactCopy(std::span<const std::byte> bytes)
      : bytes_(static_cast<std::byte*>(std::malloc(std::max<size_t>(bytes.size(), 1)))), size_(bytes.size()) {
    std::ranges::copy(bytes, bytes_);
  }
  ExactCopy(const ExactCopy&) = delete;
  ExactCopy& operator=(const ExactCopy&) = delete;
  ~ExactCopy() { std::free(bytes_); }
  std::span<std::byte> view() const { return {bytes_, size_}; }

 private:
  std::byte* bytes_;
  size_t size_;
};

class DamagedRecord : public test::SeededTest {
 protected:
  // Reads bytes as a record and checks the result for the properties that a reader relies on. Returns whether they were
  // accepted.
  static bool is_accepted(std::span<const std::byte> bytes) {
    test::largest_allocation_bytes = 0;
    const auto frame = parse_frame(bytes);
    EXPECT_LE(test::largest_allocation_bytes, bytes.size() * sizeof(TensorEntry) / 24 + kMessageBytesMax);
    if (!frame) {
      EXPECT_FALSE(frame.error().message.empty());
      return false;
    }
    expect_safe(frame.value(), bytes);
    return true;
  }

  static void expect_safe(const Frame& frame, std::span<const std::byte> bytes) {
    EXPECT_LE(frame.payload_bytes, kPayloadBytesMax);
    EXPECT_LE(frame.boundary_keys.size(), frame.tensors.size());
    for (const TensorEntry& entry : frame.tensors) {
      const bool is_shared = entry.encoding == Encoding::kShared;
      const uint64_t end = is_shared ? kPayloadBytesMax : frame.payload_bytes;
      EXPECT_EQ(entry.offset % (is_shared ? dtype_bytes(entry.dtype) : kPayloadAlignment), 0u);
      EXPECT_LE(entry.offset, end);
      EXPECT_LE(entry.bytes, end - entry.offset);
      EXPECT_LT(entry.file_index, is_shared ? kSharedFileCountMax : 1);
      const uint64_t plain = span_bytes(entry.dtype, entry.shape, entry.strides).value();
      switch (entry.encoding) {
        case Encoding::kShared:
        case Encoding::kPlain: EXPECT_EQ(plain, entry.bytes); break;
        case Encoding::kWithheld: EXPECT_EQ(entry.bytes, 0u); break;
        default: EXPECT_LE(plain / kWidenFactorMax, entry.bytes);
      }
    }
    const auto* begin = bytes.data();
    const auto* end = bytes.data() + bytes.size();
    for (std::string_view key : frame.boundary_keys) {
      EXPECT_EQ(key.size(), kBoundaryKeyBytes);
      EXPECT_GE(reinterpret_cast<const std::byte*>(key.data()), begin);
      EXPECT_LE(reinterpret_cast<const std::byte*>(key.data()) + key.size(), end);
    }
    if (!frame.nest.empty()) {
      EXPECT_GE(frame.nest.data(), begin);
      EXPECT_LE(frame.nest.data() + frame.nest.size(), end);
    }
    expect_nest_safe(frame.nest, static_cast<uint32_t>(frame.leaf_count()));
  }

  // A nest that passed its check can be walked to the end, and every tensor that it names is there.
  static void expect_nest_safe(std::span<const std::byte> nest, uint32_t tensor_count) {
    test::largest_allocation_bytes = 0;
    const auto checked = check_nest(nest, tensor_count, /*allow_pickle=*/true);
    EXPECT_LE(test::largest_allocation_bytes, 2 * kNestDepthMax * sizeof(uint64_t) + kMessageBytesMax);
    if (!checked) return;
    NestReader reader(nest);
    while (!reader.at_end()) {
      const auto token = reader.next();
      ASSERT_TRUE(token) << token.error().message;
      if (token.value().tag == NestTag::kTensor || token.value().tag == NestTag::kArray) {
        EXPECT_LT(token.value().count, tensor_count);
      }
    }
  }

  template <typename Check>
  static void for_every_flip(std::span<const std::byte> bytes, Check check) {
    const ExactCopy copy(bytes);
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      const auto mask = static_cast<std::byte>(1 << (bit % 8));
      copy.view()[bit / 8] ^= mask;
      check(copy.view());
      copy.view()[bit / 8] ^= mask;
    }
  }
};

TEST_F(DamagedRecord, EveryTruncationIsAnError) {
  for (const auto& record : sample_records()) {
    ASSERT_TRUE(is_accepted(record));
    for (size_t length = 0; length < record.size(); ++length) {
      EXPECT_FALSE(is_accepted(ExactCopy(std::span(record).first(length)).view())) << length << " of " << record.size();
    }
  }
}

TEST_F(DamagedRecord, BytesBehindTheRecordAreAnError) {
  for (auto record : sample_records()) {
    record.push_back(std::byte{0});
    EXPECT_FALSE(is_accepted(record));
  }
}

TEST_F(DamagedRecord, EverySingleBitFlipIsAnErrorOrSafeToFollow) {
  size_t accepted_count = 0;
  size_t refused_count = 0;
  for (const auto& record : sample_records()) {
    for_every_flip(record,
                   [&](std::span<const std::byte> bytes) { ++(is_accepted(bytes) ? accepted_count : refused_count); });
  }
  EXPECT_GT(refused_count, 0u);
  EXPECT_GT(accepted_count, 0u) << "a flip in a key is not an error, so some must pass";
}

TEST_F(DamagedRecord, ManyFlipsAtOnceAreAnErrorOrSafeToFollow) {
  const auto records = sample_records();
  for (int round = 0; round < 20'000; ++round) {
    auto record = records[draw<size_t>(0, records.size() - 1)];
    for (int flip = draw(2, 6); flip > 0; --flip) {
      record[draw<size_t>(0, record.size() - 1)] ^= static_cast<std::byte>(1 << draw(0, 7));
    }
    is_accepted(ExactCopy(record).view());
  }
}

TEST_F(DamagedRecord, ARandomTableUnderARightHeaderIsAnErrorOrSafeToFollow) {
  const auto whole = sample_records().back();
  for (int round = 0; round < 20'000; ++round) {
    auto record = whole;
    for (size_t place = 32; place < record.size(); ++place) {
      if (draw(0, 3) == 0) record[place] = static_cast<std::byte>(draw(0, 255));
    }
    is_accepted(ExactCopy(record).view());
  }
}

TEST_F(DamagedRecord, EveryTruncationAndBitFlipOfANestIsAnErrorOrCanBeWalked) {
  for (const auto& record : sample_records()) {
    const auto frame = parse_frame(record);
    const auto nest = frame.value().nest;
    const auto tensor_count = static_cast<uint32_t>(frame.value().leaf_count());
    ASSERT_TRUE(check_nest(nest, tensor_count, /*allow_pickle=*/true));
    for (size_t length = 0; length < nest.size(); ++length) {
      const ExactCopy cut(nest.first(length));
      EXPECT_FALSE(check_nest(cut.view(), tensor_count, /*allow_pickle=*/true)) << length << " of " << nest.size();
    }
    for_every_flip(nest, [&](std::span<const std::byte> bytes) { expect_nest_safe(bytes, tensor_count); });
  }
}

TEST_F(DamagedRecord, RandomBytesAreNeverANestThatCannotBeWalked) {
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::byte> nest(draw<size_t>(0, 60));
    for (std::byte& byte : nest) byte = static_cast<std::byte>(toss() ? draw(0, 15) : draw(0, 255));
    expect_nest_safe(ExactCopy(nest).view(), 3);
  }
}

}  // namespace
}  // namespace penstock::wire
