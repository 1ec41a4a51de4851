// SPDX-License-Identifier: Apache-2.0
#include "capture/builder.h"

#include <gtest/gtest.h>

namespace penstock::capture {
namespace {

constexpr graph::ValueId kImage = 0, kMean = 1, kResult = 2;

graph::Argument value(graph::ValueId id) { return {graph::ValueRef{id}}; }

class RanksTest : public testing::Test {
 protected:
  RanksTest() {
    ranks_.set(kImage, 4);
    ranks_.set(kMean, 3);
  }
  std::optional<size_t> rank_after(std::string op, std::vector<graph::Argument> arguments) {
    graph::Node call;
    call.results = {kResult};
    call.op = std::move(op);
    call.args = std::move(arguments);
    ranks_.note_call(call);
    return ranks_.find(kResult);
  }

  Ranks ranks_;
};

TEST_F(RanksTest, PointwiseResultHasTheMostDimensionsOfItsOperands) {
  EXPECT_EQ(rank_after("aten::sub.Tensor", {value(kMean), value(kImage)}), 4U);
  EXPECT_EQ(rank_after("aten::div.Scalar", {value(kMean), {graph::Real(255)}}), 3U);
}

TEST_F(RanksTest, PointwiseResultOfAnUnknownOperandIsUnknown) {
  EXPECT_EQ(rank_after("aten::sub.Tensor", {value(kImage), value(7)}), std::nullopt);
}

TEST_F(RanksTest, DimensionsAreAddedAndTaken) {
  EXPECT_EQ(rank_after("aten::unsqueeze", {value(kImage), {int64_t{0}}}), 5U);
  EXPECT_EQ(rank_after("aten::select.int", {value(kImage), {int64_t{0}}, {int64_t{1}}}), 3U);
  EXPECT_EQ(rank_after("aten::upsample_bilinear2d", {value(kImage)}), 4U);
}

TEST_F(RanksTest, DimensionsThatFollowFromASizeAreUnknown) {
  EXPECT_EQ(rank_after("aten::squeeze", {value(kImage)}), std::nullopt);
}

TEST_F(RanksTest, AWriteThatMayChangeDimensionsHasAllForgotten) {
  EXPECT_EQ(rank_after("aten::add_.Tensor", {value(kImage), value(kMean)}), 4U);
  EXPECT_EQ(ranks_.find(kImage), 4U);
  EXPECT_EQ(rank_after("aten::unsqueeze_", {value(kMean), {int64_t{0}}}), std::nullopt);
  EXPECT_EQ(ranks_.find(kImage), std::nullopt);
}

}  // namespace
}  // namespace penstock::capture
