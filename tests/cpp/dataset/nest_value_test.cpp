// SPDX-License-Identifier: Apache-2.0
#include "dataset/nest_value.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace penstock::dataset {
namespace {

Value back_and_forth(const Value& value) {
  const auto written = write_value(value);
  EXPECT_TRUE(written);
  EXPECT_TRUE(wire::check_nest(written.value().nest.view(), static_cast<uint32_t>(written.value().tensors.size()),
                               /*allow_pickle=*/false));
  return read_value(written.value().nest.view(), written.value().tensors).value();
}

TEST(NestValue, EveryKindComesBack) {
  const at::Tensor tensor = at::arange(5);
  const Value value = Value::dict({{"none", Value()},
                                   {"yes", true},
                                   {"integer", INT64_MIN},
                                   {"number", -0.5},
                                   {"text", "Fußgänger"},
                                   {"bytes", Value::bytes(std::string("\0\xff", 2))},
                                   {"tensor", tensor},
                                   {"list", Value::list({1, Value::tuple({tensor, "x"})})},
                                   {7, "a key that is a number"}});
  const Value back = back_and_forth(value);
  EXPECT_TRUE(back["none"].is_none());
  EXPECT_TRUE(back["yes"].boolean());
  EXPECT_EQ(back["integer"].integer(), INT64_MIN);
  EXPECT_EQ(back["number"].number(), -0.5);
  EXPECT_EQ(back["text"].text(), "Fußgänger");
  EXPECT_EQ(back["bytes"].bytes(), std::string("\0\xff", 2));
  EXPECT_TRUE(back["tensor"].tensor().is_same(tensor));
  EXPECT_EQ(back["list"][1].kind(), Value::Kind::kTuple);
  EXPECT_EQ(back.entries().back().key.integer(), 7);
}

TEST(NestValue, ObjectsOfPythonClassesHaveTheirFieldsAndTheNameOfTheClass) {
  wire::NestWriter nest;
  nest.list(3);
  nest.object("transformers:BatchEncoding", 2);
  nest.none();
  nest.dict(1);
  nest.text("input_ids");
  nest.tensor(0);
  nest.named_tuple("my_package:Sample", 2);
  nest.tensor(0);
  nest.text("name");
  nest.tuple(0);
  const std::vector<at::Tensor> tensors = {at::arange(5)};
  const Value value = read_value(nest.view(), tensors).value();
  EXPECT_EQ(value[0].type_name(), "transformers:BatchEncoding");
  EXPECT_TRUE(value[0]["input_ids"].tensor().is_same(tensors[0]));
  EXPECT_EQ(value[1].type_name(), "my_package:Sample");
  EXPECT_EQ(value[1][1].text(), "name");
  EXPECT_EQ(value[2].type_name(), "");
  const Value other = with_tensors(value, [](const at::Tensor& tensor) { return tensor.clone(); });
  EXPECT_EQ(other[0].type_name(), "transformers:BatchEncoding");
  EXPECT_EQ(other[1].type_name(), "my_package:Sample");
}

TEST(NestValue, AValueNestedTooDeepIsMalformed) {
  Value value = 1;
  for (uint32_t depth = 0; depth < wire::kNestDepthMax; ++depth) value = Value::list({value});
  EXPECT_EQ(write_value(value).error().code, Errc::kMalformed);
}

TEST(NestValue, AnUndefinedTensorIsMalformed) { EXPECT_EQ(write_value(at::Tensor()).error().code, Errc::kMalformed); }

TEST(NestValue, NumbersOfNumpysAreNumbers) {
  wire::NestWriter nest;
  nest.list(3);
  nest.scalar("<i4", std::string_view("\x05\0\0\0", 4));
  nest.scalar("|b1", std::string_view("\x01", 1));
  nest.scalar("<f4", std::string_view("\0\0\x80\x3f", 4));
  const Value value = read_value(nest.view(), {}).value();
  EXPECT_EQ(value[0].integer(), 5);
  EXPECT_TRUE(value[1].boolean());
  EXPECT_EQ(value[2].number(), 1.0);
}

TEST(NestValue, ObjectsOfPythonClassesAreTheirContent) {
  const at::Tensor tensor = at::arange(3);
  wire::NestWriter nest;
  nest.list(3);
  nest.object("collections:OrderedDict", 2), nest.none(), nest.dict(1), nest.text("a"), nest.tensor(0);
  nest.object("builtins:complex", 1), nest.list(2), nest.floating(1.5), nest.floating(-2);
  nest.object("m:Pair", 3), nest.text("context"), nest.tensor(0), nest.integer(7);
  const Value value = read_value(nest.view(), std::span(&tensor, 1)).value();
  EXPECT_TRUE(value[0]["a"].tensor().is_same(tensor));
  EXPECT_EQ(value[1][1].number(), -2);
  EXPECT_EQ(value[2].kind(), Value::Kind::kTuple);
  EXPECT_EQ(value[2][1].integer(), 7);
}

TEST(NestValue, WhatNoTypeStandsForIsUnsupportedAndNamed) {
  wire::NestWriter pickle;
  pickle.pickle("x");
  EXPECT_EQ(read_value(pickle.view(), {}).error().code, Errc::kUnsupported);
  wire::NestWriter dates;
  const at::Tensor bytes = at::arange(8);
  dates.array(0, "<M8[ns]");
  const auto refused = read_value(dates.view(), std::span(&bytes, 1));
  EXPECT_NE(refused.error().message.find("dtype <M8[ns]"), std::string::npos);
}

TEST(PackedValue, ComesBackAndRefusesTensors) {
  const Value state = Value::dict({{"iterator", Value::list({1, 2})}, {"ended", false}});
  EXPECT_EQ(unpack_value(pack_value(state).value()).value().to_json(), state.to_json());
  EXPECT_EQ(pack_value(at::arange(2)).error().code, Errc::kMalformed);
}

TEST(PackedValue, BytesThatAreNoneAreRefused) {
  auto bytes = pack_value(Value::list({1, 2})).value();
  bytes.pop_back();
  EXPECT_FALSE(unpack_value(bytes));
  EXPECT_FALSE(unpack_value({}));
}

// Neither ends the process nor reads beyond the bytes; the sanitizers see it.
TEST(PackedValue, NoTruncationIsTakenForAValueAndNoChangedByteEndsTheProcess) {
  const auto bytes = pack_value(Value::dict({{"iterator", Value::list({1, 2.5, "text", Value(), Value::bytes("xyz")})},
                                             {"ended", false}}))
                         .value();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<std::byte> exact(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_FALSE(unpack_value(exact)) << size;
  }
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<std::byte> exact = bytes;
      exact[at] ^= std::byte{1} << bit;
      static_cast<void>(unpack_value(exact));
    }
  }
}

}  // namespace
}  // namespace penstock::dataset
