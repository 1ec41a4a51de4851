// SPDX-License-Identifier: Apache-2.0
#include "replica/leaf_division.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "wire/nest.h"

namespace penstock::replica {
namespace {

using Leaves = std::vector<uint32_t>;

// {"image": {"pixels": 0, "mask": 1}, "images": 2, "labels": 3}
wire::NestWriter image_batch() {
  wire::NestWriter nest;
  nest.dict(3);
  nest.text("image"), nest.dict(2), nest.text("pixels"), nest.tensor(0), nest.text("mask"), nest.tensor(1);
  nest.text("images"), nest.tensor(2);
  nest.text("labels"), nest.tensor(3);
  return nest;
}

std::string refusal(const wire::NestWriter& nest, const std::string& name) {
  const std::vector<LeafReaders> readers{{.name = name, .is_read_here = true, .followers = {}}};
  const auto division = divide_leaves(nest.view(), readers, 0);
  return division ? "" : division.error().message;
}

TEST(LeafDivision, EachRankLacksTheLeavesThatItDoesNotRead) {
  const std::vector<LeafReaders> readers{{.name = "image.pixels", .is_read_here = true, .followers = {true, false}},
                                         {.name = "labels", .is_read_here = false, .followers = {false, true}}};
  const auto division = divide_leaves(image_batch().view(), readers, 2).value();
  EXPECT_EQ(division.absent_here, (Leaves{3}));
  EXPECT_EQ(division.absent, (std::vector<Leaves>{{3}, {0}}));
}

TEST(LeafDivision, AContainerStandsForItsLeavesAndNotForNamesThatStartAlike) {
  const std::vector<LeafReaders> readers{{.name = "image", .is_read_here = false, .followers = {}}};
  EXPECT_EQ(divide_leaves(image_batch().view(), readers, 0).value().absent_here, (Leaves{0, 1}));
}

TEST(LeafDivision, ATensorWithTwoNamesIsLeftOutIfNeitherIsRead) {
  wire::NestWriter nest;
  nest.dict(3);
  nest.text("a"), nest.tensor(0), nest.text("b"), nest.tensor(0), nest.text("c"), nest.tensor(1);
  const std::vector<LeafReaders> readers{{.name = "a", .is_read_here = false, .followers = {false}},
                                         {.name = "b", .is_read_here = true, .followers = {false}}};
  const auto division = divide_leaves(nest.view(), readers, 1).value();
  EXPECT_EQ(division.absent_here, Leaves{});
  EXPECT_EQ(division.absent, (std::vector<Leaves>{{0}}));
}

TEST(LeafDivision, AnUnknownNameIsRefusedWithTheNamesThatThereAre) {
  const std::string text = refusal(image_batch(), "pixels");
  EXPECT_NE(text.find("got 'pixels'"), std::string::npos) << text;
  EXPECT_NE(text.find("'image.pixels', 'image.mask', 'images', 'labels'"), std::string::npos) << text;
}

TEST(LeafDivision, ALeafWithoutPlaceholderIsRefused) {
  wire::NestWriter nest;
  nest.dict(2);
  nest.text("array"), nest.array(0, ""), nest.text("object"), nest.object("m:A", 2), nest.none(), nest.tensor(1);
  EXPECT_NE(refusal(nest, "array").find("'array' is a numpy array"), std::string::npos);
  EXPECT_NE(refusal(nest, "object").find("got 'object': 'object.0' is"), std::string::npos);
}

TEST(LeafDivision, APickleIsRefused) {
  wire::NestWriter nest;
  nest.pickle("");
  EXPECT_NE(refusal(nest, "0").find("sent as a pickle"), std::string::npos);
}

}  // namespace
}  // namespace penstock::replica
