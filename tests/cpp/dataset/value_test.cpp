// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "penstock/fields.h"
#include "penstock/value.h"

namespace shop {

struct Purchase {
  at::Tensor amount;
  int64_t customer = 0;
  std::optional<std::string> note;
};
PENSTOCK_FIELDS(Purchase, amount, customer, note)

}  // namespace shop

namespace penstock {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kValue);
    return error.what();
  }
  return "";
}

TEST(Value, ReadAsWhatItIsNotSaysWhatItIs) {
  const Value value = Value::dict({{"image", at::arange(3)}, {"label", 3}});
  EXPECT_NE(refusal([&] { value.tensor(); }).find("a dict with 'image', 'label'; a tensor was requested"),
            std::string::npos);
  EXPECT_NE(refusal([&] { value["mask"]; }).find("'mask' was requested from a dict with 'image', 'label'"),
            std::string::npos);
  EXPECT_NE(refusal([&] { Value::list({1})[1]; }).find("part 1 was requested from a list of 1"), std::string::npos);
}

TEST(Value, JsonComesBack) {
  const std::string text = R"({"a":[1,2.5,"x",null,true],"b":{}})";
  EXPECT_EQ(Value::from_json(text).to_json(), text);
  EXPECT_EQ(Value::from_json("-9223372036854775808").integer(), INT64_MIN);
}

TEST(Value, MalformedJsonIsRefused) {
  for (const char* text : {"", "{", "[1,]", "18446744073709551615", "{\"a\":1}}"})
    EXPECT_NE(refusal([&] { Value::from_json(text); }), "") << text;
  EXPECT_NE(refusal([&] { Value::from_json(std::string(100000, '[') + std::string(100000, ']')); }), "");
  EXPECT_NE(refusal([&] { Value(at::arange(2)).to_json(); }).find("a tensor"), std::string::npos);
}

Value purchase_of(int64_t customer) {
  return shop::Purchase{.amount = at::arange(2), .customer = customer, .note = {}};
}

// "could not convert 'Sample' to 'penstock::Value'", of a dataset whose `get` returned its struct.
TEST(Fields, AStructIsReturnedAsAValue) {
  EXPECT_EQ(purchase_of(7)["customer"].integer(), 7);
  EXPECT_EQ(Value::list({purchase_of(1), shop::Purchase{}})[1]["customer"].integer(), 0);
}

TEST(Fields, AStructIsADictAndComesBackFromDictAndList) {
  const shop::Purchase purchase{.amount = at::arange(2), .customer = 7, .note = {}};
  const Value value = to_value(purchase);
  EXPECT_EQ(value["customer"].integer(), 7);
  EXPECT_TRUE(value["note"].is_none());
  EXPECT_EQ(Conversion<shop::Purchase>::from_value(value, "batch").customer, 7);
  const Value list = Value::list({at::arange(2), 8, "late"});
  EXPECT_EQ(Conversion<shop::Purchase>::from_value(list, "batch").note, "late");
}

TEST(Fields, WhatDoesNotFitIsNamed) {
  const auto read = [](const Value& value) {
    return refusal([&] { Conversion<shop::Purchase>::from_value(value, "batch"); });
  };
  EXPECT_NE(read(Value::dict({{"amount", at::arange(2)}})).find("read as a Purchase, whose field 'customer'"),
            std::string::npos);
  EXPECT_NE(read(Value::list({1, 2})).find("a Purchase of 3 fields, but it is a list of 2"), std::string::npos);
  EXPECT_NE(read(Value::list({1, 2, "x"})).find("batch['amount'] is 1; a tensor is expected"), std::string::npos);
  EXPECT_NE(read(at::arange(2)).find("a dict or a list, for a Purchase"), std::string::npos);
}

TEST(Fields, NestedMapsBytesAndNothingConvert) {
  using Inner = std::map<std::string, std::optional<std::vector<std::byte>>>;
  const std::map<std::string, Inner> maps = {{"a", {{"some", {{std::byte{0}, std::byte{255}}}}, {"none", {}}}},
                                             {"b", {}}};
  const Value value = to_value(maps);
  EXPECT_EQ(value["a"]["some"].bytes(), std::string("\0\xff", 2));
  EXPECT_TRUE(value["a"]["none"].is_none());
  EXPECT_EQ((Conversion<std::map<std::string, Inner>>::from_value(value, "batch")), maps);
  using Numbers = std::map<std::string, int64_t>;
  EXPECT_NE(refusal([] { Conversion<Numbers>::from_value(Value::list({1}), "batch"); }).find("a dict"),
            std::string::npos);
  EXPECT_NE(refusal([] {
              Conversion<Numbers>::from_value(Value::dict({{"x", "y"}}), "batch");
            }).find("batch['x']"),
            std::string::npos);
}

TEST(Fields, TuplesVectorsAndNumbersConvert) {
  using Parts = std::tuple<std::vector<double>, uint8_t, std::pair<bool, std::string>>;
  const Parts parts{{1.5, 2}, 200, {true, "x"}};
  EXPECT_EQ(Conversion<Parts>::from_value(to_value(parts), "batch"), parts);
  EXPECT_NE(refusal([] { Conversion<uint8_t>::from_value(300, "batch"); }).find("range of its type"),
            std::string::npos);
}

}  // namespace
}  // namespace penstock
