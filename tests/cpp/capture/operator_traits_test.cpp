// SPDX-License-Identifier: Apache-2.0
#include "capture/operator_traits.h"

#include <gtest/gtest.h>

#include "capture/schema.h"

namespace penstock::capture {
namespace {

std::string twin_of(const char* name) {
  const auto twin = functional_twin(*find_operator(name));
  return twin ? twin->name + (twin->is_view_alone ? ", a view" : "") : "none";
}

std::string with_numbers(const char* name, const std::set<size_t>& positions) {
  return overload_with_numbers(*find_operator(name), positions).value_or("none");
}

TEST(WrittenArguments, AreThoseThatTheSchemaMarks) {
  EXPECT_EQ(written_arguments(*find_operator("aten::sub_.Tensor")), std::vector<WrittenArgument>{{0}});
  EXPECT_EQ(written_arguments(*find_operator("aten::frexp.Tensor_out")), (std::vector<WrittenArgument>{{1}, {2}}));
  EXPECT_TRUE(written_arguments(*find_operator("aten::sub.Tensor")).empty());
}

TEST(WrittenArguments, IncludeRunningStatisticsWhereTheirFlagIsSet) {
  const std::vector<WrittenArgument> statistics = {{3, 5}, {4, 5}};
  EXPECT_EQ(written_arguments(*find_operator("aten::native_batch_norm")), statistics);
  EXPECT_EQ(written_arguments(*find_operator("aten::instance_norm")), statistics);
  EXPECT_EQ(written_arguments(*find_operator("aten::_native_batch_norm_legit")),
            (std::vector<WrittenArgument>{{3}, {4}}));
}

TEST(FunctionalVariant, HasTheSameArgumentsAndWritesNothing) {
  EXPECT_EQ(twin_of("aten::sub_.Tensor"), "aten::sub.Tensor");
  EXPECT_EQ(twin_of("aten::pow_.Scalar"), "aten::pow.Tensor_Scalar");
  EXPECT_EQ(twin_of("aten::index_put_"), "aten::index_put");
  EXPECT_EQ(twin_of("aten::relu_"), "aten::relu");
}

TEST(FunctionalVariant, OfAWriteThatMovesNoDataIsAView) {
  EXPECT_EQ(twin_of("aten::transpose_"), "aten::transpose.int, a view");
  EXPECT_EQ(twin_of("aten::t_"), "aten::t, a view");
  EXPECT_EQ(twin_of("aten::unsqueeze_"), "aten::unsqueeze, a view");
  EXPECT_EQ(twin_of("aten::squeeze_"), "aten::squeeze, a view");
  EXPECT_EQ(twin_of("aten::squeeze_.dim"), "aten::squeeze.dim, a view");
  EXPECT_EQ(twin_of("aten::squeeze_.dims"), "aten::squeeze.dims, a view");
}

TEST(FunctionalVariant, IsNoneOfWhatDrawsOrWritesElsewhere) {
  EXPECT_EQ(twin_of("aten::uniform_"), "none");
  EXPECT_EQ(twin_of("aten::sub.Tensor"), "none");
  EXPECT_EQ(twin_of("aten::sub.out"), "none");
}

TEST(OverloadWithNumbers, TakesThemWhereTensorsWere) {
  EXPECT_EQ(with_numbers("aten::sub.Tensor", {1}), "aten::sub.Scalar");
  EXPECT_EQ(with_numbers("aten::pow.Tensor_Tensor", {1}), "aten::pow.Tensor_Scalar");
  EXPECT_EQ(with_numbers("aten::pow.Tensor_Tensor", {0}), "aten::pow.Scalar");
  EXPECT_EQ(with_numbers("aten::sub.Tensor", {}), "none");
  EXPECT_EQ(with_numbers("aten::matmul", {1}), "none");
  EXPECT_EQ(with_numbers("aten::sum.dim_IntList", {1}), "none");  // a list, and no tensor
}

}  // namespace
}  // namespace penstock::capture
