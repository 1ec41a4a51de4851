// SPDX-License-Identifier: Apache-2.0
#include "wire/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "../base/seeded_test.h"
#include "record_samples.h"

namespace penstock::wire {
namespace {

class Frames : public test::SeededTest {
 protected:
  static void expect_round_trip(const Frame& frame) {
    const auto record = write_frame(frame);
    const auto parsed = parse_frame(record);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value().tensors, frame.tensors);
    EXPECT_EQ(parsed.value().boundary_keys, frame.boundary_keys);
    EXPECT_TRUE(std::ranges::equal(parsed.value().nest, frame.nest));
    EXPECT_EQ(parsed.value().payload_bytes, frame.payload_bytes);
    EXPECT_EQ(parsed.value().leaf_count(), frame.tensors.size() - frame.boundary_keys.size());
  }

  static Frame frame_of(std::vector<TensorEntry> entries) {
    Frame frame{.tensors = std::move(entries), .boundary_keys = {}, .nest = {}};
    for (TensorEntry& entry : frame.tensors) {
      entry.offset = frame.payload_bytes;
      frame.payload_bytes = align_up(entry.offset + entry.bytes, kPayloadAlignment);
    }
    return frame;
  }

  // Overwrites a number of the record of one float32 tensor [1, 2] and reads it.
  template <typename T>
  static Result<Frame> parse_with(size_t offset, T value) {
    static std::vector<std::byte> record;  // the memory that the result views
    record = make_record({make_entry(6, {1, 2})}, nest_of_tensors(1));
    std::memcpy(record.data() + offset, &value, sizeof value);
    return parse_frame(record);
  }

  std::vector<int64_t> draw_shape() {
    std::vector<int64_t> shape(draw<size_t>(0, 6));
    for (int64_t& size : shape) size = draw<int64_t>(0, 5);
    return shape;
  }
  std::vector<int64_t> draw_strides(size_t count) {
    std::vector<int64_t> strides(count);
    for (int64_t& stride : strides) stride = draw<int64_t>(0, 100);
    return strides;
  }
};

// The bytes of the worked example: the lines that are indented by four, without the words after three spaces.
std::vector<std::byte> bytes_of_the_worked_example() {
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "../../../csrc/wire";
  std::ifstream file(folder / "PROTOCOL.md");
  std::vector<std::byte> bytes;
  bool is_there = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) is_there = line == "## A worked example";
    if (!is_there || !line.starts_with("    ")) continue;
    line = line.substr(4);
    std::istringstream digits(line.substr(0, line.find("   ")));
    for (std::string pair; digits >> pair;) bytes.push_back(static_cast<std::byte>(std::stoi(pair, nullptr, 16)));
  }
  return bytes;
}

TEST_F(Frames, TheWorkedExampleOfTheProtocolIsWhatIsWrittenByteForByte) {
  NestWriter nest;
  nest.list(2), nest.tensor(0), nest.text("a");
  EXPECT_EQ(make_record({make_entry(kDTypeFloat32, {1, 2})}, nest.view()), bytes_of_the_worked_example());
}

TEST_F(Frames, TheWorkedExampleOfTheProtocolIsReadAsItSays) {
  const auto record = bytes_of_the_worked_example();
  const auto frame = parse_frame(record);
  ASSERT_TRUE(frame) << frame.error().message;
  ASSERT_EQ(frame.value().tensors.size(), 1u);
  const TensorEntry expected{.dtype = 6, .offset = 0, .bytes = 8, .shape = {1, 2}, .strides = {2, 1}};
  EXPECT_EQ(frame.value().tensors[0], expected);
  EXPECT_EQ(frame.value().payload_bytes, 64u);
  EXPECT_TRUE(check_nest(frame.value().nest, 1, /*allow_pickle=*/false));
}

TEST_F(Frames, EveryDtypeComesBackInEveryKindOfShape) {
  int dtype_count = 0;
  for (int code = 0; code < 256; ++code) {
    const auto dtype = static_cast<DTypeCode>(code);
    if (dtype_bytes(dtype) == 0) continue;
    ++dtype_count;
    expect_round_trip(frame_of({
        make_entry(dtype, {}),
        make_entry(dtype, {0}),
        make_entry(dtype, {3, 0, 4}),
        make_entry(dtype, {2, 3}),
        make_entry(dtype, {2, 3}, {1, 2}),                 // transposed
        make_entry(dtype, {4, 5}, {0, 0}),                 // expanded
        make_entry(dtype, {4, 5}, {70, 7}),                // a slice with holes
        make_entry(dtype, {2, 3, 5, 7}, {105, 1, 21, 3}),  // channels last
        make_entry(dtype, std::vector<int64_t>(kDimCountMax, 1)),
    }));
  }
  EXPECT_EQ(dtype_count, 20);
}

TEST_F(Frames, RandomTablesComeBack) {
  for (int round = 0; round < 300; ++round) {
    std::vector<TensorEntry> entries(draw<size_t>(0, 20));
    for (TensorEntry& entry : entries) {
      const auto shape = draw_shape();
      entry = make_entry(static_cast<DTypeCode>(draw(0, 7)), shape, draw_strides(shape.size()));
    }
    Frame frame = frame_of(std::move(entries));
    frame.boundary_keys.assign(draw<size_t>(0, frame.tensors.size()), kSomeKey);
    const auto nest = bytes_of(std::string(draw<size_t>(0, 50), 'n'));
    frame.nest = nest;
    expect_round_trip(frame);
  }
}

TEST_F(Frames, TheMostTensorsThatOneRecordMayHoldComeBack) {
  const std::vector<TensorEntry> entries(kTensorCountMax, make_entry(0, {1}));
  expect_round_trip(frame_of(entries));
}

TEST_F(Frames, AnotherMagicVersionOrReservedByteIsMalformed) {
  EXPECT_EQ(parse_with<uint32_t>(0, 0x31464e51).error().code, Errc::kMalformed);
  EXPECT_EQ(parse_with<uint16_t>(4, 1).error().code, Errc::kMalformed);
  EXPECT_EQ(parse_with<uint16_t>(6, 1).error().code, Errc::kMalformed);
  EXPECT_EQ(parse_with<uint8_t>(34, 9).error().code, Errc::kMalformed) << "an encoding that there is none of";
  EXPECT_EQ(parse_with<uint8_t>(35, 1).error().code, Errc::kMalformed);
  EXPECT_EQ(parse_with<uint32_t>(36, 1).error().code, Errc::kMalformed);
}

TEST_F(Frames, ClaimsAboveTheCapsAreTooLarge) {
  EXPECT_EQ(parse_with<uint32_t>(8, kTensorCountMax + 1).error().code, Errc::kTooLarge);
  EXPECT_EQ(parse_with<uint64_t>(16, kPayloadBytesMax + 1).error().code, Errc::kTooLarge);
  EXPECT_EQ(parse_with<uint32_t>(24, kNestBytesMax + 1).error().code, Errc::kTooLarge);
  EXPECT_EQ(parse_with<uint8_t>(33, kDimCountMax + 1).error().code, Errc::kTooLarge);
}

TEST_F(Frames, MoreBoundaryKeysThanTensorsIsMalformed) {
  EXPECT_EQ(parse_with<uint32_t>(12, 2).error().code, Errc::kMalformed);
}

TEST_F(Frames, ATensorThatIsNotWhereItsShapeSaysIsMalformed) {
  EXPECT_EQ(parse_with<uint64_t>(40, 8).error().code, Errc::kMalformed) << "an offset that is not aligned";
  EXPECT_EQ(parse_with<uint64_t>(40, 128).error().code, Errc::kMalformed) << "beyond the payload";
  EXPECT_EQ(parse_with<uint64_t>(40, ~uint64_t{63}).error().code, Errc::kMalformed) << "an offset that wraps";
  EXPECT_EQ(parse_with<uint64_t>(48, 12).error().code, Errc::kMalformed) << "more bytes than its shape needs";
  EXPECT_EQ(parse_with<uint64_t>(48, 4).error().code, Errc::kMalformed) << "fewer bytes than its shape needs";
  EXPECT_EQ(parse_with<int64_t>(56, -1).error().code, Errc::kMalformed) << "a negative size";
  EXPECT_EQ(parse_with<int64_t>(72, -2).error().code, Errc::kMalformed) << "a negative stride";
  EXPECT_EQ(parse_with<uint8_t>(32, 12).error().code, Errc::kMalformed) << "a dtype that does not travel";
}

TEST_F(Frames, TensorThatIsWithheldHasNoBytes) {
  TensorEntry entry{.dtype = 6, .encoding = Encoding::kWithheld, .shape = {1000, 1000}, .strides = {1000, 1}};
  Frame frame{.tensors = {entry}, .boundary_keys = {}, .nest = {}};
  expect_round_trip(frame);
  frame.tensors[0].bytes = 4'000'000;
  frame.payload_bytes = 4'000'000;
  EXPECT_FALSE(parse_frame(write_frame(frame)));
  frame.tensors[0] = entry;
  const std::string key(kBoundaryKeyBytes, 'a');
  frame.boundary_keys = {key};
  EXPECT_FALSE(parse_frame(write_frame(frame)));  // a boundary tensor
}

TEST_F(Frames, SharedTensorsNameTheirFilesAndHaveNothingInThePayload) {
  const Frame frame{.tensors = {shared_entry(0, 12), make_entry(6, {2}), shared_entry(1, 0), shared_entry(0, 1 << 20)},
                    .boundary_keys = {},
                    .nest = {},
                    .payload_bytes = 64};
  expect_round_trip(frame);
  EXPECT_EQ(frame.shared_file_count(), 2u);
}

TEST_F(Frames, ASharedTensorThatIsNoWholeElementOrOfAnUnknownFileIsRefused) {
  const auto code_of = [](std::vector<TensorEntry> entries, std::vector<std::string_view> keys = {}) {
    const auto record = write_frame({.tensors = std::move(entries), .boundary_keys = std::move(keys), .nest = {}});
    const auto frame = parse_frame(record);
    return frame ? std::nullopt : std::optional(frame.error().code);
  };
  EXPECT_EQ(code_of({shared_entry(0, 4)}), std::nullopt);
  EXPECT_EQ(code_of({shared_entry(0, 6)}), Errc::kMalformed) << "half an element";
  EXPECT_EQ(code_of({shared_entry(1, 4)}), Errc::kMalformed) << "file 0 is left out";
  EXPECT_EQ(code_of({shared_entry(0, 4)}, {kSomeKey}), Errc::kMalformed) << "a boundary tensor";
  EXPECT_EQ(code_of({shared_entry(0, kPayloadBytesMax - 4)}), Errc::kTooLarge);
  EXPECT_EQ(code_of({shared_entry(0, ~uint64_t{3})}), Errc::kTooLarge) << "an offset that wraps";
  TensorEntry plain = make_entry(6, {});
  plain.file_index = 1;
  EXPECT_EQ(code_of({plain}), Errc::kMalformed) << "a file of a tensor that is not shared";
  std::vector<TensorEntry> entries;
  for (uint32_t index = 0; index < kSharedFileCountMax; ++index) entries.push_back(shared_entry(index, 0));
  EXPECT_EQ(code_of(entries), std::nullopt);
  entries.push_back(shared_entry(kSharedFileCountMax, 0));
  EXPECT_EQ(code_of(entries), Errc::kTooLarge);
}

TEST_F(Frames, TensorOfMoreThan64TimesItsNarrowBytesIsTooLarge) {
  const auto parse = [](int64_t count) {
    TensorEntry entry = make_entry(4, {count});
    entry.encoding = Encoding::kRows;
    entry.bytes = 100;
    const auto record = make_record({entry}, nest_of_tensors(1));
    const auto frame = parse_frame(record);
    return frame ? std::nullopt : std::optional(frame.error().code);
  };
  EXPECT_EQ(parse(kWidenFactorMax * 100 / 8), std::nullopt);
  EXPECT_EQ(parse(kWidenFactorMax * 101 / 8), Errc::kTooLarge);
}

TEST_F(Frames, TensorsThatShareBytesCountAsOftenAsTheyDo) {
  const TensorEntry plain = make_entry(kDTypeFloat32, {1000});
  TensorEntry narrow = make_entry(4, {1000});
  narrow.encoding = Encoding::kOffset8;
  narrow.bytes = 1008;
  TensorEntry withheld = plain;
  withheld.encoding = Encoding::kWithheld;
  withheld.bytes = 0;
  Frame frame{.tensors = {plain, plain, narrow, withheld}, .boundary_keys = {}, .nest = {}};
  EXPECT_EQ(whole_bytes(frame), 4 * kTensorObjectBytes + 2 * 4000 + 8000);
}

TEST_F(Frames, UnknownEncodingIsRefused) {
  TensorEntry entry{.dtype = 6, .encoding = static_cast<Encoding>(200), .shape = {}, .strides = {}};
  EXPECT_FALSE(parse_frame(write_frame({.tensors = {entry}, .boundary_keys = {}, .nest = {}})));
}

}  // namespace
}  // namespace penstock::wire
