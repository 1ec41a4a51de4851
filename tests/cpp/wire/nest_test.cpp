// SPDX-License-Identifier: Apache-2.0
#include "wire/nest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../base/seeded_test.h"
#include "record_samples.h"
#include "wire/frame.h"

namespace penstock::wire {
namespace {

TEST(ArrayDtype, TheBytesOfAnElementFollowFromItsText) {
  EXPECT_EQ(array_item_bytes("|b1"), 1u);
  EXPECT_EQ(array_item_bytes(">i4"), 4u);
  EXPECT_EQ(array_item_bytes("<f16"), 16u);
  EXPECT_EQ(array_item_bytes("<c32"), 32u);
  EXPECT_EQ(array_item_bytes("<U5"), 20u);
  EXPECT_EQ(array_item_bytes("|S300"), 300u);
  EXPECT_EQ(array_item_bytes("|V7"), 7u);
  EXPECT_EQ(array_item_bytes("|S0"), 0u);
  EXPECT_EQ(array_item_bytes("<M8[ns]"), 8u);
  EXPECT_EQ(array_item_bytes(">m8[25s]"), 8u);
  EXPECT_EQ(array_item_bytes("<M8"), 8u);
}

TEST(ArrayDtype, WhatIsNoPlainDtypeHasNone) {
  for (const char* text :
       {"",         "<",           "<f",   "f4",      "float32",         "|O",     "|O8",  "<i3",  "<b2",
        "<i-4",     "<i+4",        "< i4", "<i4 ",    "<i4,<i4",         "(2)<i4", "<M8[", "<M8]", "<M8[]",
        "<M8[n s]", "<M8[ns],|O8", "<M9",  "<i4[ns]", "{'names':['a']}", "|T16",   "=i4"}) {
    EXPECT_FALSE(array_item_bytes(text)) << text;
  }
}

TEST(ArrayDtype, NumbersOfBytesThatNumpyCannotHaveAreRefused) {
  EXPECT_TRUE(array_item_bytes("|S2147483647"));
  EXPECT_FALSE(array_item_bytes("|S2147483648"));
  EXPECT_FALSE(array_item_bytes("<U536870912"));
  EXPECT_FALSE(array_item_bytes("|S99999999999999999999999"));
  EXPECT_FALSE(array_item_bytes("<M8[" + std::string(kArrayDtypeBytesMax, 's') + "]"));
}

class Nest : public test::SeededTest {
 protected:
  NestToken next() {
    auto token = reader().next();
    EXPECT_TRUE(token) << token.error().message;
    return token ? token.value() : NestToken{.tag = NestTag::kNone, .text = {}, .dtype = {}};
  }
  NestReader& reader() {
    if (!reader_) reader_.emplace(nest_.view());
    return *reader_;
  }
  Errc refusal(uint32_t tensor_count = 0, bool allow_pickle = true) const {
    return check_nest(nest_.view(), tensor_count, allow_pickle).error().code;
  }
  bool is_accepted(uint32_t tensor_count = 0) const {
    return static_cast<bool>(check_nest(nest_.view(), tensor_count, /*allow_pickle=*/true));
  }
  void lists_in_lists(uint32_t count) {
    for (uint32_t level = 0; level < count; ++level) nest_.list(1);
  }

  // A random value, and its tokens in words.
  std::string write_value(int depth) {
    switch (depth > 0 ? draw(0, 14) : draw(0, 10)) {
      case 0: return nest_.none(), "None";
      case 1: return nest_.boolean(true), "True";
      case 2: {
        const auto value = draw(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
        return nest_.integer(value), std::to_string(value);
      }
      case 3: return nest_.floating(0.25 * draw(-9, 9)), "float";
      case 4: {
        const std::string text(draw<size_t>(0, 9), static_cast<char>(draw<int>(-128, 127)));
        return nest_.text(text), "'" + text + "'";
      }
      case 5: {
        const std::string text(draw<size_t>(0, 9), '\0');
        return nest_.bytes(text), "b'" + text + "'";
      }
      case 6: return nest_.tensor(2), "tensor 2";
      case 7: {
        const std::string digits(draw<size_t>(1, 30), static_cast<char>(draw<int>(-128, 127)));
        return nest_.big_integer(digits), "integer '" + digits + "'";
      }
      case 8: return nest_.array(1, ""), "array 1 ''";
      case 9: return nest_.array(2, "<M8[25s]"), "array 2 '<M8[25s]'";
      case 10: return nest_.scalar("<f4", "four"), "scalar '<f4' 'four'";
      case 11:
        return write_container(
            "[", depth, [this](uint32_t count) { nest_.list(count); }, 1);
      case 12:
        return write_container(
            "(", depth, [this](uint32_t count) { nest_.tuple(count); }, 1);
      case 13:
        return write_container(
            "m:A.B(", depth, [this](uint32_t count) { nest_.named_tuple("m:A.B", count); }, 1);
      case 14: nest_.object("m:O", 2), nest_.none(); return "m:O<2 None " + write_value(depth - 1);
      default:
        return write_container(
            "{", depth, [this](uint32_t count) { nest_.dict(count); }, 2);
    }
  }
  template <typename Open>
  std::string write_container(const std::string& name, int depth, Open open, uint32_t values_per_element) {
    const auto count = draw<uint32_t>(0, 4);
    open(count);
    std::string words = name + std::to_string(count);
    for (uint32_t value = 0; value < count * values_per_element; ++value) words += " " + write_value(depth - 1);
    return words;
  }

  // The tokens that are read back, in the same words.
  std::string read_value() {
    const NestToken token = next();
    switch (token.tag) {
      case NestTag::kNone: return "None";
      case NestTag::kFalse: return "False";
      case NestTag::kTrue: return "True";
      case NestTag::kInteger: return std::to_string(token.integer);
      case NestTag::kFloat: return "float";
      case NestTag::kText: return "'" + std::string(token.text) + "'";
      case NestTag::kBytes: return "b'" + std::string(token.text) + "'";
      case NestTag::kPickle: return "pickle";
      case NestTag::kTensor: return "tensor " + std::to_string(token.count);
      case NestTag::kList: return read_container("[", token.count, token.count);
      case NestTag::kTuple: return read_container("(", token.count, token.count);
      case NestTag::kDict: return read_container("{", token.count, token.count * 2);
      case NestTag::kBigInteger: return "integer '" + std::string(token.text) + "'";
      case NestTag::kArray: return "array " + std::to_string(token.count) + " '" + std::string(token.dtype) + "'";
      case NestTag::kScalar: return "scalar '" + std::string(token.dtype) + "' '" + std::string(token.text) + "'";
      case NestTag::kNamedTuple: return read_container(std::string(token.text) + "(", token.count, token.count);
      case NestTag::kObject: return read_container(std::string(token.text) + "<", token.count, token.count);
    }
    return "unknown";
  }
  std::string read_container(const std::string& name, uint32_t count, uint32_t value_count) {
    std::string words = name + std::to_string(count);
    for (uint32_t value = 0; value < value_count; ++value) words += " " + read_value();
    return words;
  }

  NestWriter nest_;
  std::optional<NestReader> reader_;
};

TEST_F(Nest, NumbersComeBackToTheBit) {
  for (const int64_t value : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) nest_.integer(value);
  for (const double value : {-0.0, std::numeric_limits<double>::infinity(), 5e-324}) nest_.floating(value);
  nest_.floating(std::nan("7"));
  EXPECT_EQ(next().integer, 0);
  EXPECT_EQ(next().integer, -1);
  EXPECT_EQ(next().integer, std::numeric_limits<int64_t>::min());
  EXPECT_TRUE(std::signbit(next().floating));
  EXPECT_EQ(next().floating, std::numeric_limits<double>::infinity());
  EXPECT_EQ(next().floating, 5e-324);
  EXPECT_TRUE(std::isnan(next().floating));
  EXPECT_TRUE(reader().at_end());
}

TEST_F(Nest, RandomNestsComeBack) {
  for (int round = 0; round < 1000; ++round) {
    nest_.clear();
    reader_.reset();
    const std::string written = write_value(6);
    ASSERT_TRUE(is_accepted(/*tensor_count=*/3));
    ASSERT_EQ(read_value(), written);
    ASSERT_TRUE(reader().at_end());
  }
}

// So that no nest makes a batch too large by itself.
TEST_F(Nest, ValuesAreTakenForAtMostAsManyTimesTheirBytesAsABatchMayComeTo) {
  for (int round = 0; round < 1000; ++round) {
    nest_.clear();
    write_value(6);
    const auto checked = check_nest(nest_.view(), /*tensor_count=*/3, /*allow_pickle=*/true);
    ASSERT_TRUE(checked);
    ASSERT_LE(checked.value(), kWholeFactorMax * nest_.view().size());
  }
}

// A list takes 56 bytes of Python's memory and comes in 5; an array 112 and more, and comes in 6.
TEST_F(Nest, ObjectsOfItsValuesAreCounted) {
  constexpr uint32_t kCount = 1000;
  const auto bytes_of = [&] { return check_nest(nest_.view(), 1, /*allow_pickle=*/false).value(); };
  nest_.list(kCount);
  for (uint32_t place = 0; place < kCount; ++place) nest_.list(0);
  EXPECT_GE(bytes_of(), kCount * (56 + 8));
  nest_.clear(), nest_.list(kCount);
  for (uint32_t place = 0; place < kCount; ++place) nest_.array(0, "");
  EXPECT_GE(bytes_of(), kCount * (3 * 112 + 8)) << "one array, and those that it views";
  nest_.clear(), nest_.text(std::string(1000, 'a') + "\xf0\x9f\x98\x80");
  EXPECT_GE(bytes_of(), 4 * 1001u) << "a character of 4 bytes makes all characters as wide";
}

TEST_F(Nest, SixtyFourLevelsPassAndOneMoreIsTooLarge) {
  lists_in_lists(kNestDepthMax - 1);
  nest_.none();
  EXPECT_TRUE(is_accepted());
  nest_.clear();
  lists_in_lists(kNestDepthMax);
  nest_.none();
  EXPECT_EQ(refusal(), Errc::kTooLarge);
}

TEST_F(Nest, AMillionLevelsAreRefusedWithoutFollowingThem) {
  lists_in_lists(1'000'000);
  EXPECT_EQ(refusal(), Errc::kTooLarge);
}

TEST_F(Nest, ManyContainersSideBySideAreNotDeep) {
  nest_.list(1000);
  for (int sibling = 0; sibling < 1000; ++sibling) nest_.list(0);
  EXPECT_TRUE(is_accepted());
}

TEST_F(Nest, PickleIsRefusedFromAPeerThatIsNotTrusted) {
  nest_.list(1), nest_.pickle("\x80\x05N.");
  EXPECT_EQ(refusal(0, /*allow_pickle=*/false), Errc::kUnsupported);
  EXPECT_TRUE(is_accepted());
}

TEST_F(Nest, ATensorThatIsNotInTheTableIsMalformed) {
  nest_.tensor(2);
  EXPECT_EQ(refusal(/*tensor_count=*/2), Errc::kMalformed);
  EXPECT_TRUE(is_accepted(/*tensor_count=*/3));
}

TEST_F(Nest, AnArrayThatIsNotInTheTableIsMalformed) {
  nest_.array(2, "<U3");
  EXPECT_EQ(refusal(/*tensor_count=*/2), Errc::kMalformed);
  EXPECT_TRUE(is_accepted(/*tensor_count=*/3));
}

TEST_F(Nest, AnArrayWhoseElementsHaveNoBytesOrAreAddressesIsMalformed) {
  for (const char* dtype : {"<U0", "|V0", "|O8", "O", "|V8,|O8"}) {
    nest_.clear(), nest_.array(0, dtype);
    EXPECT_EQ(refusal(/*tensor_count=*/1), Errc::kMalformed) << dtype;
  }
}

TEST_F(Nest, AScalarHasTheBytesOfOneElement) {
  nest_.scalar("<U2", "12345678");
  EXPECT_TRUE(is_accepted());
  for (const char* element : {"", "1234567", "123456789"}) {
    nest_.clear(), nest_.scalar("<U2", element);
    EXPECT_EQ(refusal(), Errc::kMalformed) << element;
  }
  nest_.clear(), nest_.scalar("<U0", "");
  EXPECT_TRUE(is_accepted());
  nest_.clear(), nest_.scalar("", "");
  EXPECT_EQ(refusal(), Errc::kMalformed);
}

TEST_F(Nest, ABigIntegerHasAByteAtLeastAndItsCapAtMost) {
  nest_.big_integer(std::string(kBigIntegerBytesMax, 'x'));
  EXPECT_TRUE(is_accepted());
  nest_.clear(), nest_.big_integer("");
  EXPECT_EQ(refusal(), Errc::kMalformed);
  nest_.clear(), nest_.big_integer(std::string(kBigIntegerBytesMax + 1, 'x'));
  EXPECT_EQ(refusal(), Errc::kMalformed);
}

TEST_F(Nest, ANamedTupleNestsAsATupleDoesAndItsNameHasACap) {
  for (uint32_t level = 0; level < kNestDepthMax; ++level) nest_.named_tuple("m:A", 1);
  nest_.none();
  EXPECT_EQ(refusal(), Errc::kTooLarge);
  nest_.clear(), nest_.named_tuple(std::string(kClassNameBytesMax, 'a'), 0);
  EXPECT_TRUE(is_accepted());
  nest_.clear(), nest_.named_tuple(std::string(kClassNameBytesMax + 1, 'a'), 0);
  EXPECT_EQ(refusal(), Errc::kMalformed);
}

TEST_F(Nest, AnObjectNestsAsATupleDoesAndHasAContext) {
  for (uint32_t level = 0; level < kNestDepthMax; ++level) nest_.object("m:A", 1);
  nest_.none();
  EXPECT_EQ(refusal(), Errc::kTooLarge);
  nest_.clear(), nest_.object(std::string(kClassNameBytesMax, 'a'), 1), nest_.none();
  EXPECT_TRUE(is_accepted());
  nest_.clear(), nest_.object(std::string(kClassNameBytesMax + 1, 'a'), 1), nest_.none();
  EXPECT_EQ(refusal(), Errc::kMalformed);
  nest_.clear(), nest_.object("m:A", 0);
  EXPECT_EQ(refusal(), Errc::kMalformed);
}

TEST_F(Nest, ArraysAndDirectChildrenOfObjectsAreFixed) {
  nest_.list(4);
  nest_.tensor(0);
  nest_.array(1, "");
  nest_.object("m:A", 4), nest_.none(), nest_.tensor(2), nest_.list(1), nest_.tensor(3), nest_.tensor(4);
  nest_.dict(1), nest_.text("a"), nest_.tensor(2);
  EXPECT_EQ(fixed_leaves(nest_.view()), (std::set<uint32_t>{1, 2, 4}));
  nest_.clear(), nest_.pickle("");
  EXPECT_EQ(fixed_leaves(nest_.view()), std::nullopt);
}

TEST_F(Nest, LeavesAreNamedByTheKeysAndPositionsThatLeadToThem) {
  nest_.dict(4);
  nest_.text("image"), nest_.dict(2), nest_.text("pixels"), nest_.tensor(3), nest_.integer(7), nest_.tensor(0);
  nest_.text("pair"), nest_.tuple(2), nest_.text("a text"), nest_.tensor(1);
  nest_.tuple(2), nest_.integer(1), nest_.text("in a key"), nest_.tensor(2);
  nest_.boolean(true), nest_.named_tuple("m:A", 1), nest_.list(1), nest_.array(4, "");
  const std::vector<NamedLeaf> wanted{{.name = "image.pixels", .index = 3},
                                      {.name = "image.7", .index = 0},
                                      {.name = "pair.1", .index = 1},
                                      {.name = "?", .index = 2},
                                      {.name = "True.0.0", .index = 4, .is_fixed = true}};
  EXPECT_EQ(named_leaves(nest_.view()), wanted);
}

TEST_F(Nest, FieldsOfADataclassHaveTheirOwnNames) {
  nest_.list(1);
  nest_.object("m:Sample", 4), nest_.none();
  nest_.dict(1), nest_.text("x"), nest_.tensor(0);
  nest_.tensor(1);
  nest_.list(1), nest_.tensor(2);
  const std::vector<NamedLeaf> wanted{
      {.name = "0.x", .index = 0}, {.name = "0.1", .index = 1, .is_fixed = true}, {.name = "0.2.0", .index = 2}};
  EXPECT_EQ(named_leaves(nest_.view()), wanted);
}

TEST_F(Nest, ABatchOfOneTensorHasNoNameAndAPickleHasNoLeaves) {
  nest_.tensor(0);
  EXPECT_EQ(named_leaves(nest_.view()), (std::vector<NamedLeaf>{{.name = "", .index = 0}}));
  nest_.clear(), nest_.list(2), nest_.tensor(0), nest_.pickle("");
  EXPECT_EQ(named_leaves(nest_.view()), std::nullopt);
}

TEST_F(Nest, AnythingBehindTheOneValueIsMalformed) {
  nest_.none(), nest_.none();
  EXPECT_EQ(refusal(), Errc::kMalformed);
}

TEST_F(Nest, NothingAtAllIsMalformed) { EXPECT_EQ(refusal(), Errc::kMalformed); }

TEST_F(Nest, ContainersThatClaimMoreThanBytesAreLeftAreMalformed) {
  // The token itself is refused, as a reader reserves room for its claim.
  nest_.list(0xffffffff), nest_.none();
  EXPECT_EQ(reader().next().error().code, Errc::kMalformed);
  nest_.clear();
  reader_.reset();
  nest_.dict(2), nest_.none(), nest_.none(), nest_.none();
  EXPECT_EQ(reader().next().error().code, Errc::kMalformed);
  nest_.clear();
  reader_.reset();
  nest_.named_tuple("m:A", 2), nest_.none();
  EXPECT_EQ(reader().next().error().code, Errc::kMalformed);
}

class PythonValues : public Nest {
 protected:
  // Whether Python can make the nest, which the grammar allows. Leaf 0 is of float32, 1 of 3 x 20 bytes, 2 of bfloat16.
  bool are_made() const {
    const std::vector<TensorEntry> leaves{
        {.dtype = kDTypeFloat32, .shape = {4}, .strides = {1}},
        {.dtype = kDTypeUInt8, .shape = {3, 20}, .strides = {20, 1}},
        {.dtype = 15, .shape = {4}, .strides = {1}},
    };
    EXPECT_TRUE(check_nest(nest_.view(), static_cast<uint32_t>(leaves.size()), /*allow_pickle=*/true));
    return static_cast<bool>(check_python_values(nest_.view(), leaves));
  }
  bool is_text(std::string_view text) {
    nest_.clear(), nest_.text(text);
    return are_made();
  }
  // A dictionary with the key that `write` writes.
  template <typename Write>
  bool is_key(Write write) {
    nest_.clear(), nest_.dict(1);
    write();
    nest_.list(0);
    return are_made();
  }
  bool is_array(uint32_t leaf, std::string_view dtype) {
    nest_.clear(), nest_.array(leaf, dtype);
    return are_made();
  }
};

// They reached the program as an error in the place of the batch, which other workers could have made.
TEST_F(PythonValues, TextsAreUtf8) {
  for (const char* text : {"", "abcdefgh and more", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xed\xa0\x80",
                           "\xf4\x8f\xbf\xbf", "abcdefg\xc2\xa2"})
    EXPECT_TRUE(is_text(text)) << testing::PrintToString(text);
  EXPECT_TRUE(is_text(std::string_view("\0", 1)));
  for (const char* text : {"\xff", "\x80", "\xc3", "\xc0\x80", "\xe0\x80\x80", "\xf0\x80\x80\x80", "\xf4\x90\x80\x80",
                           "\xf5\x80\x80\x80", "abcdefgh\xe2\x82", "\xe2\x28\xa1", "abcdefghi\xfe"})
    EXPECT_FALSE(is_text(text)) << testing::PrintToString(text);
}

TEST_F(PythonValues, KeysHaveAHash) {
  EXPECT_TRUE(is_key([&] { nest_.none(); }));
  EXPECT_TRUE(is_key([&] { nest_.text("a"); }));
  EXPECT_TRUE(is_key([&] { nest_.scalar("<f4", "four"); }));
  EXPECT_TRUE(is_key([&] { nest_.tuple(2), nest_.integer(1), nest_.tuple(1), nest_.bytes("b"); }));
  EXPECT_FALSE(is_key([&] { nest_.list(0); }));
  EXPECT_FALSE(is_key([&] { nest_.dict(0); }));
  EXPECT_FALSE(is_key([&] { nest_.tensor(0); }));
  EXPECT_FALSE(is_key([&] { nest_.array(0, ""); }));
  EXPECT_FALSE(is_key([&] { nest_.named_tuple("m:A", 0); }));
  EXPECT_FALSE(is_key([&] { nest_.object("m:A", 1), nest_.none(); }));
  EXPECT_FALSE(is_key([&] { nest_.scalar("|V3", "abc"); }));
  EXPECT_FALSE(is_key([&] { nest_.tuple(2), nest_.integer(1), nest_.tuple(1), nest_.tensor(0); }));
  nest_.clear(), nest_.list(2), nest_.tensor(0), nest_.dict(2);
  for (const char* key : {"a", "b"}) nest_.text(key), nest_.tuple(1), nest_.dict(0);
  EXPECT_TRUE(are_made()) << "values need none";
}

TEST_F(PythonValues, ArraysAreTensorsOfTheirElements) {
  EXPECT_TRUE(is_array(0, ""));
  EXPECT_TRUE(is_array(1, ""));
  EXPECT_TRUE(is_array(1, "<U5"));
  EXPECT_TRUE(is_array(1, "|S20"));
  EXPECT_FALSE(is_array(1, "<U4"));
  EXPECT_FALSE(is_array(0, "<U1")) << "no tensor of bytes";
  EXPECT_FALSE(is_array(2, "")) << "numpy has no bfloat16";
}

TEST_F(Nest, AnUnknownTagIsMalformed) {
  const std::byte tag{16};
  EXPECT_EQ(check_nest({&tag, 1}, 0, /*allow_pickle=*/true).error().code, Errc::kMalformed);
}

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
