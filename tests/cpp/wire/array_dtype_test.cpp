// SPDX-License-Identifier: Apache-2.0
#include "wire/array_dtype.h"

#include <gtest/gtest.h>

#include <string>

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

}  // namespace
}  // namespace penstock::wire
