// SPDX-License-Identifier: Apache-2.0
#include "runtime/operator_call.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "expect_same.h"
#include "graph/ir_text.h"
#include "runtime/executor.h"

namespace penstock::runtime {
namespace {

// Counts the tensors whose memory is allocated in its lifetime.
class Allocations : private c10::Allocator {
 public:
  Allocations() : previous_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this); }
  ~Allocations() override { c10::SetCPUAllocator(previous_); }

  int count() const { return count_; }

 private:
  c10::DataPtr allocate(size_t bytes) override {
    ++count_;
    return previous_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  c10::Allocator* previous_;
  int count_ = 0;
};

Executor executor_of(const std::string& statements, std::vector<at::Tensor> constants, bool allow_state) {
  auto graph = graph::parse_graph("penstock-ir 1\n" + statements);
  EXPECT_TRUE(graph) << graph.error().message;
  auto executor = Executor::create(std::move(graph).value(), std::move(constants),
                                   {.allow_random = false, .allow_state = allow_state});
  EXPECT_TRUE(executor) << executor.error().message;
  return std::move(executor).value();
}

void expect_same_layout(const at::Tensor& seen, const at::Tensor& expected, const std::string& what) {
  expect_same(seen, expected, what);
  EXPECT_EQ(seen.strides(), expected.strides()) << what;
}

// Runs a call on a value that dies with it, with and without writing over. Returns whether it saved memory.
bool saves_memory(const std::string& call, const at::Tensor& x, const at::Tensor& other) {
  const auto form = [](const at::Tensor& tensor) {
    std::string text = graph::name_of(tensor.scalar_type() == at::kFloat      ? graph::Dtype::kFloat32
                                      : tensor.scalar_type() == at::kDouble   ? graph::Dtype::kFloat64
                                      : tensor.scalar_type() == at::kHalf     ? graph::Dtype::kFloat16
                                      : tensor.scalar_type() == at::kBFloat16 ? graph::Dtype::kBfloat16
                                      : tensor.scalar_type() == at::kBool     ? graph::Dtype::kBool
                                                                              : graph::Dtype::kInt64)
                           .data();
    text += " [";
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) text += (dim > 0 ? ", " : "") + std::to_string(tensor.size(dim));
    return text + "]";
  };
  const std::string statements = "input %x leaf 0 " + form(x) + "\ninput %o leaf 1 " + form(other) +
                                 "\n%v = aten::clone(%x)\n%y = " + call + "\noutput %y\n";
  const at::Tensor x_before = x.clone();
  const at::Tensor other_before = other.clone();
  const Executor plain = executor_of(statements, {}, true);
  const Executor executor = executor_of(statements, {}, false);
  const Allocations all;
  const auto expected = plain.run(std::array{x, other});
  const int plain_count = all.count();
  const auto seen = executor.run(std::array{x, other});
  const int saving_count = all.count() - plain_count;
  EXPECT_TRUE(expected) << expected.error().message;
  EXPECT_TRUE(seen) << seen.error().message;
  if (seen && expected)
    expect_same_layout(seen.value()[0], expected.value()[0], call + " on " + form(x) + ", " + form(other));
  EXPECT_TRUE(at::equal(x, x_before)) << call;
  EXPECT_TRUE(at::equal(other, other_before)) << call;
  return saving_count < plain_count;
}

const std::vector<std::string> kCalls = {"aten::abs(%v)",
                                         "aten::add.Scalar(%v, 3)",
                                         "aten::add.Tensor(%v, %o, alpha=2)",
                                         "aten::ceil(%v)",
                                         "aten::clamp(%v, -0.5, none)",
                                         "aten::clamp_max(%v, 0.25)",
                                         "aten::clamp_min(%v, 0)",
                                         "aten::cos(%v)",
                                         "aten::div.Scalar(%v, 255)",
                                         "aten::div.Tensor(%v, %o)",
                                         "aten::exp(%v)",
                                         "aten::expm1(%v)",
                                         "aten::floor(%v)",
                                         "aten::leaky_relu(%v, 0.1)",
                                         "aten::log(%v)",
                                         "aten::log10(%v)",
                                         "aten::log1p(%v)",
                                         "aten::log2(%v)",
                                         "aten::mul.Scalar(%v, 0.1)",
                                         "aten::mul.Tensor(%v, %o)",
                                         "aten::mul.Tensor(%v, %v)",
                                         "aten::neg(%v)",
                                         "aten::pow.Tensor_Scalar(%v, 2)",
                                         "aten::pow.Tensor_Scalar(%v, 0.5)",
                                         "aten::reciprocal(%v)",
                                         "aten::relu(%v)",
                                         "aten::round(%v)",
                                         "aten::rsqrt(%v)",
                                         "aten::sigmoid(%v)",
                                         "aten::sin(%v)",
                                         "aten::sqrt(%v)",
                                         "aten::sub.Scalar(%v, 1.5)",
                                         "aten::sub.Tensor(%v, %o)",
                                         "aten::tanh(%v)"};

TEST(WriteOver, EveryOperatorGivesItsOwnBitsAndStridesAndTakesNoMemory) {
  at::manual_seed(0);
  const at::Tensor x = at::randn({7, 3, 31, 33});
  const at::Tensor row = at::randn({3, 1, 1});
  for (const std::string& call : kCalls) {
    EXPECT_TRUE(saves_memory(call, x, row)) << call;
    EXPECT_TRUE(saves_memory(call, x.to(at::kDouble), row.to(at::kDouble))) << call;
  }
  EXPECT_TRUE(saves_memory("aten::masked_fill.Scalar(%v, %o, -1e9)", x, x > 0));
}

TEST(WriteOver, OtherFormsOfOperandsGiveTheSameBitsToo) {
  at::manual_seed(0);
  const at::Tensor x = at::randn({7, 3, 31, 33});
  const at::Tensor last = x.contiguous(at::MemoryFormat::ChannelsLast);
  for (const std::string call : {"aten::add.Tensor(%v, %o)", "aten::div.Tensor(%v, %o)", "aten::sub.Tensor(%o, %v)"})
    for (const at::Tensor& a : {x, last, x.transpose(1, 3), x.slice(3, 1, 30).clone(), x.select(1, 0).unsqueeze(1)})
      for (const at::Tensor& b : {at::randn(a.sizes()), a.clone(), at::randn({}), at::ones({a.size(3)}, at::kLong),
                                  at::randn({}, at::kDouble), at::randn(a.sizes()).to(at::kHalf)})
        saves_memory(call, a, b);
}

TEST(WriteOver, AResultThatIsWiderOrOfAnotherDtypeHasMemoryOfItsOwn) {
  const at::Tensor x = at::randn({64, 128});
  EXPECT_FALSE(saves_memory("aten::add.Tensor(%v, %o)", x, at::randn({2, 64, 128})));
  EXPECT_FALSE(saves_memory("aten::add.Tensor(%v, %o)", x, at::randn({64, 128}).to(at::kDouble)));
  EXPECT_FALSE(saves_memory("aten::masked_fill.Scalar(%v, %o, 0)", x, at::ones({2, 64, 128}, at::kBool)));
  const at::Tensor counts = at::ones({64, 128}, at::kLong);
  EXPECT_FALSE(saves_memory("aten::div.Tensor(%v, %o)", counts, counts));
  EXPECT_FALSE(saves_memory("aten::exp(%v)", counts, counts));
}

// `mul_` by a number gave other bits than `mul` of the same bfloat16 numbers.
TEST(WriteOver, HalfPrecisionHasMemoryOfItsOwn) {
  const at::Tensor x = at::randn({7, 3, 31, 33});
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16})
    for (const std::string& call : kCalls) EXPECT_FALSE(saves_memory(call, x.to(dtype), x.to(dtype))) << call;
}

// A batch that the user keeps, a constant, and a value that something else still shows.
TEST(WriteOver, WhatOthersHoldIsNeverWrittenTo) {
  const at::Tensor x = at::randn({64, 128});
  const at::Tensor constant = at::randn({64, 128});
  const at::Tensor x_before = x.clone();
  const at::Tensor constant_before = constant.clone();
  const std::string inputs =
      "input %x leaf 0 float32 [64, 128]\ninput %c const \"c\" float32 [64, 128]\n%v = aten::mul.Tensor(%x, %c)\n";
  for (const std::string statements :
       {"%y = aten::exp(%x)\noutput %y\n", "%w = aten::view(%x, [128, 64])\n%y = aten::exp(%w)\noutput %y\n",
        "%s = aten::exp(%c)\n%y = aten::sub.Tensor(%s, %x)\noutput %y\n",
        "%w = aten::view(%v, [128, 64])\n%y = aten::exp(%v)\noutput %y\noutput %w\n",
        "%w = aten::t(%v)\n%y = aten::exp(%v)\n%z = aten::neg(%w)\noutput %y\noutput %z\n",
        "%y = aten::exp(%v)\noutput %y\noutput %v\n",
        "%y = aten::exp(%v)\n%z = aten::neg(%v)\noutput %y\noutput %z\n"}) {
    const auto expected = executor_of(inputs + statements, {constant}, true).run(std::array{x});
    const Executor executor = executor_of(inputs + statements, {constant}, false);
    for (int batch = 0; batch < 2; ++batch) {
      const auto seen = executor.run(std::array{x});
      ASSERT_TRUE(seen && expected) << statements;
      for (size_t i = 0; i < expected.value().size(); ++i)
        expect_same_layout(seen.value()[i], expected.value()[i], statements);
      EXPECT_TRUE(at::equal(x, x_before)) << statements;
      EXPECT_TRUE(at::equal(constant, constant_before)) << statements;
    }
  }
}

TEST(WriteOver, OnlyOperatorsThatAreListedHaveAVariant) {
  const auto find = [](const char* name, const char* overload) {
    return find_write_over(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)).has_value();
  };
  EXPECT_TRUE(find("aten::mul", "Tensor"));
  EXPECT_FALSE(find("aten::cumsum", ""));
  EXPECT_FALSE(find("aten::mm", ""));
  EXPECT_FALSE(find("aten::remainder", "Tensor"));
}

}  // namespace
}  // namespace penstock::runtime
