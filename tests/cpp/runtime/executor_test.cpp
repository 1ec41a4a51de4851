// SPDX-License-Identifier: Apache-2.0
#include "runtime/executor.h"

#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DefaultDtype.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <thread>

#include "capture/capture.h"
#include "expect_same.h"
#include "graph/ir_text.h"

namespace penstock::runtime {
namespace {

constexpr const char* kInputs =
    "penstock-ir 1\ninput %x leaf 0 float32 [n, 4]\ninput %c const \"self.deviation\" float32 [4]\n"
    "input %n int \"n\" = %x.size(0)\n";

Executor folded(const std::string& statements, const at::Tensor& constant) {
  auto graph = graph::parse_graph(kInputs + statements);
  EXPECT_TRUE(graph) << graph.error().message;
  auto executor = Executor::create(std::move(graph).value(), {constant});
  EXPECT_TRUE(executor) << executor.error().message;
  return std::move(executor).value();
}

at::Tensor result_of(const Executor& executor, const at::Tensor& x) {
  auto outputs = executor.run(std::array{x});
  EXPECT_TRUE(outputs) << outputs.error().message;
  return outputs.value().at(0);
}

TEST(ConstantFolding, WhatDependsOnConstantsAloneIsNotRunForABatch) {
  const at::Tensor deviation = at::rand({4}) + 0.5;
  const at::Tensor x = at::randn({3, 4});
  const Executor executor = folded(
      "%k = aten::arange(4, dtype=dtype:float32)\n%r = aten::reciprocal(%c)\n%s = aten::mul.Tensor(%r, %k)\n"
      "%y = aten::mul.Tensor(%x, %s)\noutput %y\n",
      deviation);
  EXPECT_EQ(executor.saved_node_count(), 3u);
  for (int batch = 0; batch < 2; ++batch)
    EXPECT_TRUE(at::equal(result_of(executor, x), x * (deviation.reciprocal() * at::arange(4, at::kFloat))));
}

TEST(ConstantFolding, SizesOfTheBatchAreNoConstants) {
  const Executor executor = folded("%m = size::mul(%n, 2)\n%y = aten::full([%m], 1.5)\noutput %y\n", at::zeros({4}));
  EXPECT_EQ(executor.saved_node_count(), 0u);
  for (const int64_t rows : {2, 5})
    EXPECT_TRUE(at::equal(result_of(executor, at::zeros({rows, 4})), at::full({rows * 2}, 1.5)));
}

TEST(ConstantFolding, WritingToAnOutputChangesNoLaterBatch) {
  const at::Tensor deviation = at::rand({4});
  for (const char* statements :
       {"%y = aten::exp(%c)\noutput %y\n", "%e = aten::exp(%c)\n%y = aten::view(%e, [2, 2])\noutput %y\n",
        "%e = aten::exp(%c)\n%y = aten::expand_as(%e, %x)\noutput %y\n",
        "%e = aten::exp(%c)\n%f = aten::contiguous(%e)\n%y = aten::expand_as(%f, %x)\noutput %y\n"}) {
    const Executor executor = folded(statements, deviation);
    const at::Tensor first = result_of(executor, at::zeros({1, 4}));
    const at::Tensor expected = first.clone();
    first.zero_();
    EXPECT_TRUE(at::equal(result_of(executor, at::zeros({1, 4})), expected)) << statements;
  }
}

TEST(ConstantFolding, UnderOtherSettingsThanItWasFoldedUnderARunComputesEverything) {
  // A sum that is split among threads is another sum.
  const at::Tensor constant = at::rand({4});
  const std::string statements =
      "%r = aten::rsqrt(%c)\n%t = aten::mul.Scalar(%r, 1e-30)\n%u = aten::mul.Scalar(%t, 1e-12)\n"
      "%y = aten::add.Tensor(%x, %u)\noutput %y\n";
  const Executor executor = folded(statements, constant);
  EXPECT_EQ(executor.saved_node_count(), 3u);
  const at::Tensor x = at::zeros({1, 4});
  EXPECT_TRUE(result_of(executor, x).ne(0).all().item<bool>());
  ASSERT_TRUE(at::globalContext().setFlushDenormal(true));
  const at::Tensor flushed = result_of(executor, x);
  at::globalContext().setFlushDenormal(false);
  EXPECT_TRUE(flushed.eq(0).all().item<bool>());
}

TEST(ConstantFolding, WhatFailsFailsInTheRunAndSaysSo) {
  const Executor executor = folded(
      "%v = aten::view(%c, [3])\n%w = aten::neg(%v)\n%y = aten::add.Tensor(%x, %w)\noutput %y\n", at::zeros({4}));
  EXPECT_EQ(executor.saved_node_count(), 0u);
  const auto outputs = executor.run(std::array{at::zeros({1, 4})});
  ASSERT_FALSE(outputs);
  EXPECT_TRUE(outputs.error().message.starts_with("aten::view failed on")) << outputs.error().message;
}

TEST(ConstantFolding, MemoryThatIsKeptIsBounded) {
  auto graph = graph::parse_graph(std::string(kInputs) +
                                  "%a = aten::zeros([1000])\n%v = aten::view(%a, [10, 100])\n%b = aten::ones([1000])\n"
                                  "%d = aten::neg(%b)\n%s = aten::sum(%v)\n%t = aten::sum(%d)\n"
                                  "%u = aten::add.Tensor(%s, %t)\n%y = aten::add.Tensor(%x, %u)\noutput %y\n");
  ASSERT_TRUE(graph) << graph.error().message;
  capture::annotate(graph.value());
  std::vector<OperatorCall> calls;
  for (const graph::Node& node : graph.value().nodes) calls.push_back(OperatorCall::prepare(node).value());
  Frame constants(graph.value().value_names.size());
  constants[1] = at::zeros({4});
  const Folding folding = fold_constants(graph.value(), calls, constants, 6000);
  // The view takes no memory of its own; the second thousand is too much.
  EXPECT_EQ(folding.is_folded, (std::vector<bool>{true, true, false, false, false, false, false, false}));
  EXPECT_EQ(folding.node_count, 2u);
}

TEST(ConstantFolding, WhatOnlyFoldedNodesReadIsDropped) {
  auto graph = graph::parse_graph(
      std::string(kInputs) + "%a = aten::zeros([4])\n%b = aten::neg(%a)\n%y = aten::add.Tensor(%x, %b)\noutput %y\n");
  capture::annotate(graph.value());
  std::vector<OperatorCall> calls;
  for (const graph::Node& node : graph.value().nodes) calls.push_back(OperatorCall::prepare(node).value());
  Frame constants(graph.value().value_names.size());
  constants[1] = at::zeros({4});
  const Folding folding = fold_constants(graph.value(), calls, constants);
  EXPECT_EQ(folding.node_count, 2u);
  EXPECT_TRUE(folding.start[3].isNone());
  EXPECT_TRUE(folding.start[4].isTensor());
}

// The memory of CPU tensors made in its lifetime: how much of it was held at a time, and no more than a limit.
class TensorMemory : private c10::Allocator {
 public:
  explicit TensorMemory(size_t limit_bytes) : previous_(c10::GetCPUAllocator()), limit_bytes_(limit_bytes) {
    c10::SetCPUAllocator(this);
  }
  ~TensorMemory() override { c10::SetCPUAllocator(previous_); }

  size_t peak_bytes() const { return peak_bytes_; }

 private:
  struct Block {
    TensorMemory* owner;
    size_t bytes;
    std::unique_ptr<std::byte[]> memory;
  };

  c10::DataPtr allocate(size_t bytes) override {
    if (live_bytes_ + bytes > limit_bytes_) throw std::bad_alloc();
    live_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    auto block = std::make_unique<Block>(Block{this, bytes, std::make_unique<std::byte[]>(bytes)});
    std::byte* memory = block->memory.get();
    return {memory, block.release(), &release, at::Device(at::kCPU)};
  }

  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->owner->live_bytes_ -= block->bytes;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  c10::Allocator* previous_;
  const size_t limit_bytes_;
  size_t live_bytes_ = 0;
  size_t peak_bytes_ = 0;
};

graph::Graph load(std::string_view statements) {
  auto parsed = graph::parse_graph("penstock-ir 1\n" + std::string(statements));
  EXPECT_TRUE(parsed) << parsed.error().message;
  return parsed ? std::move(parsed).value() : graph::Graph{};
}

Executor make(std::string_view statements, std::vector<at::Tensor> constants = {}, ExecutorOptions options = {}) {
  auto executor = Executor::create(load(statements), std::move(constants), options);
  EXPECT_TRUE(executor) << executor.error().message;
  return std::move(executor).value();
}

Fault refusal(std::string_view statements, std::vector<at::Tensor> constants = {}) {
  const auto executor = Executor::create(load(statements), std::move(constants));
  EXPECT_FALSE(executor);
  return executor ? Fault{Errc::kFailed, "accepted"} : executor.error();
}

at::Tensor only(Result<std::vector<at::Tensor>> outputs) {
  EXPECT_TRUE(outputs) << outputs.error().message;
  EXPECT_EQ(outputs.value().size(), 1u);
  return outputs.value()[0];
}

constexpr const char* kNormalise = R"(
input %x leaf 0 uint8 [s0, 3, h, w]
input %mean const "mean" float32 [1, 3, 1, 1]
%f = aten::to.dtype(%x, dtype:float32)
%d = aten::div.Scalar(%f, 255)
%n = aten::sub.Tensor(%d, %mean)
output %n
)";

TEST(Executor, GivesTheBitsOfEagerTorch) {
  const at::Tensor mean = at::rand({1, 3, 1, 1});
  const at::Tensor x = at::randint(0, 256, {4, 3, 17, 19}, at::kByte);
  const Executor executor = make(kNormalise, {mean});
  expect_same(only(executor.run(std::array{x})), at::sub(at::div(x.to(at::kFloat), 255), mean));
}

TEST(Executor, EveryKindOfArgumentReachesItsOperator) {
  const at::Tensor x = at::randn({4, 6});
  const at::Tensor index = at::tensor({2, 0, 1}, at::kLong);
  const std::string inputs =
      "input %x leaf 0 float32 [a, b]\ninput %i leaf 1 int64 [3]\ninput %n int \"n\" = %x.size(1)\n";
  const auto run = [&](const std::string& call) {
    return only(make(inputs + call + "\noutput %y\n").run(std::array{x, index}));
  };
  expect_same(run("%y = aten::cat([%x, %x], -1)"), at::cat({x, x}, -1));
  expect_same(run("%y = aten::index.Tensor(%x, [none, %i])"), x.index({at::indexing::Slice(), index}));
  expect_same(run("%y = aten::index.Tensor(%x, [%i])"), x.index({index}));
  expect_same(run("%y = aten::sum.dim_IntList(%x, [1], true, dtype=dtype:float64)"), x.sum({1}, true, at::kDouble));
  expect_same(run("%y = aten::sum.dim_IntList(%x, 1)"), x.sum(1));
  expect_same(run("%y = aten::view(%x, [%n, -1])"), x.view({6, -1}));
  expect_same(run("%y = aten::full([%n, 2], 1.5)"), at::full({6, 2}, 1.5));
  expect_same(run("%y = aten::add.Tensor(%x, %x, alpha=3)"), at::add(x, x, 3));
  expect_same(run("%y = aten::clamp(%x, none, 0.5)"), at::clamp(x, std::nullopt, 0.5));
  expect_same(run("%y = aten::leaky_relu(%x, 0.2)"), at::leaky_relu(x, 0.2));
  expect_same(run("%y = aten::contiguous(%x, memory_format=memory_format:contiguous_format)"), x);
  expect_same(
      run("%y = aten::arange.start_step(0, %n, 2, dtype=dtype:int64, device=device:cpu, layout=layout:strided)"),
      at::arange(0, 6, 2, at::kLong));
  expect_same(run("%y = aten::div.Tensor_mode(%x, %x, rounding_mode=\"floor\")"), at::div(x, x, "floor"));
  expect_same(run("%l = aten::split.Tensor(%x, 4, 1)\n%y = list::get(%l, -1)"), x.slice(1, 4, 6));
  expect_same(run("%v, %y = aten::max.dim(%x, 1)"), std::get<1>(at::max(x, 1)));
  expect_same(run("%y = aten::linspace(0, 1, %n)"), at::linspace(0, 1, 6));
}

TEST(Executor, SizesAreComputedAsPythonDoes) {
  const Executor executor = make(R"(
input %x leaf 0 float32 [a, b]
%r = size::rank(%x)
%n = size::numel(%x)
%s = size::sizes(%x)
%s1 = list::get(%s, 1)
%l = list::length(%s)
%h = size::floordiv(%s1, 2)
%k = size::add(%h, %r)
%m = size::mul(%k, %l)
%q = size::truediv(%n, %m)
%y = aten::full([%m], %q)
%t = size::dtype(%x)
%z = aten::zeros(%s, dtype=%t)
output %y
output %z
)");
  const auto outputs = executor.run(std::array{at::zeros({5, 7}, at::kFloat)});
  ASSERT_TRUE(outputs) << outputs.error().message;
  expect_same(outputs.value()[0], at::full({10}, 3.5));  // (7 // 2 + 2) * 2 = 10, 35 / 10
  expect_same(outputs.value()[1], at::zeros({5, 7}));
}

TEST(Executor, ResultsServeTheTrainersAutograd) {
  const Executor executor = make("input %x leaf 0 float32 [n]\n%y = aten::neg(%x)\noutput %y\n");
  const at::Tensor boundary = only(executor.run(std::array{at::ones({3})}));
  EXPECT_FALSE(boundary.is_inference());
  EXPECT_FALSE(boundary.requires_grad());
  const at::Tensor weight = at::ones({3}).requires_grad_(true);
  (boundary * weight).sum().backward();
  expect_same(weight.grad(), at::full({3}, -1.0));
}

TEST(Executor, CallersStateOfTorchIsAsItWas) {
  const Executor executor = make("input %x leaf 0 float32 [n]\n%y = aten::neg(%x)\noutput %y\n");
  ASSERT_TRUE(at::GradMode::is_enabled());
  ASSERT_TRUE(executor.run(std::array{at::ones({3})}));
  ASSERT_FALSE(executor.run(std::array{at::ones({3, 3})}));
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_TRUE((at::ones({1}).requires_grad_(true) * 2).requires_grad());
}

TEST(Executor, BatchesOfOtherSizesRunWhereTheSizeIsASymbol) {
  const at::Tensor mean = at::zeros({1, 3, 1, 1});
  const Executor executor = make(kNormalise, {mean});
  for (const int64_t rows : {0, 1, 7}) {
    const auto outputs = executor.run(std::array{at::zeros({rows, 3, 2, 2}, at::kByte)});
    ASSERT_TRUE(outputs) << outputs.error().message;
    EXPECT_EQ(outputs.value()[0].size(0), rows);
  }
}

TEST(Executor, LeavesThatDifferFromTheCaptureAreRefused) {
  const Executor executor = make(R"(
input %x leaf 0 float32 [n, 3]
input %y leaf 2 int64 [n]
%z = aten::neg(%x)
output %z
)");
  const at::Tensor x = at::zeros({4, 3});
  const at::Tensor y = at::zeros({4}, at::kLong);
  const at::Tensor other = at::zeros({9});
  EXPECT_TRUE(executor.accepts(std::array{x, other, y}));
  const auto expect_refused = [&](std::vector<at::Tensor> leaves, const std::string& part) {
    const auto accepted = executor.accepts(leaves);
    ASSERT_FALSE(accepted) << part;
    EXPECT_EQ(accepted.error().code, Errc::kMismatch);
    EXPECT_NE(accepted.error().message.find(part), std::string::npos) << accepted.error().message;
    EXPECT_FALSE(executor.run(leaves));
  };
  expect_refused({x, other}, "leaf 2 of the batch is not there");
  expect_refused({x, other, at::Tensor()}, "leaf 2 of the batch is not there");
  expect_refused({x.to(at::kDouble), other, y}, "leaf 0 of the batch is float64 [4, 3]");
  expect_refused({at::zeros({4, 2}), other, y}, "leaf 0 of the batch is float32 [4, 2]");
  expect_refused({at::zeros({4, 3, 1}), other, y}, "leaf 0 of the batch is float32 [4, 3, 1]");
  expect_refused({x, other, at::zeros({5}, at::kLong)}, "with n already 4");
  expect_refused({at::zeros({4, 3}).requires_grad_(true), other, y}, "requires grad");
  expect_refused({at::zeros({4, 3}, at::TensorOptions(at::kMeta)), other, y}, "leaf 0");
  expect_refused({at::zeros({4, 3}).to_sparse(), other, y}, "leaf 0");
}

TEST(Executor, FailingOperatorIsNamedWithItsLabelAndShapes) {
  const Executor executor = make(R"(
input %x leaf 0 float32 [n, 3]
input %y leaf 1 float32 [m, 3]
%z = aten::mm(%x, %y) group 0 "x @ y at model.py:7"
output %z
)");
  const auto outputs = executor.run(std::array{at::zeros({4, 3}), at::zeros({5, 3})});
  ASSERT_FALSE(outputs);
  EXPECT_EQ(outputs.error().code, Errc::kFailed);
  EXPECT_NE(outputs.error().message.find("aten::mm (x @ y at model.py:7) failed on (float32 [4, 3], float32 [5, 3])"),
            std::string::npos)
      << outputs.error().message;
  EXPECT_EQ(outputs.error().message.find('\n'), std::string::npos);
}

TEST(Executor, FailingOperatorIsNamedWithTheLineThatCallsIt) {
  const auto message = [](const std::string& suffix) {
    const Executor executor = make("input %x leaf 0 float32 [n]\n%z = aten::mm(%x, %x)" + suffix + "\noutput %z\n");
    return executor.run(std::array{at::zeros({4})}).error().message;
  };
  EXPECT_TRUE(message(" at \"model.py:7\"").starts_with("aten::mm at model.py:7 failed on (")) << message("");
  const std::string of_a_unit = message(" group 0 \"mm, add_ at model.py:9\" at \"model.py:7\"");
  EXPECT_TRUE(of_a_unit.starts_with("aten::mm at model.py:7 (mm, add_ at model.py:9) failed on (")) << of_a_unit;
  const std::string of_one_call = message(" group 0 \"mm at model.py:7\" at \"model.py:7\"");
  EXPECT_TRUE(of_one_call.starts_with("aten::mm (mm at model.py:7) failed on (")) << of_one_call;
}

TEST(Executor, FailingSizeOperatorIsAnError) {
  const Executor executor = make(R"(
input %x leaf 0 float32 [n]
input %n int "n" = %x.size(0)
%z = size::floordiv(1, %n)
%y = aten::full([%z], 1)
output %y
)");
  EXPECT_TRUE(executor.run(std::array{at::zeros({1})}));
  const auto outputs = executor.run(std::array{at::zeros({0})});
  ASSERT_FALSE(outputs);
  EXPECT_NE(outputs.error().message.find("the divisor is zero"), std::string::npos) << outputs.error().message;
}

TEST(Executor, OutOfMemoryIsAnErrorOfItsOperator) {
  const Executor executor = make("%y = aten::zeros([4194304])\noutput %y\n");
  ASSERT_TRUE(executor.run({}));
  const TensorMemory memory(1 << 20);
  const auto outputs = executor.run({});
  ASSERT_FALSE(outputs);
  EXPECT_EQ(outputs.error().code, Errc::kFailed);
  EXPECT_NE(outputs.error().message.find("aten::zeros"), std::string::npos) << outputs.error().message;
}

TEST(Executor, ValuesOfTheWrongKindAreErrorsAndNeverReadAsSomethingElse) {
  const std::string inputs = "input %x leaf 0 float32 [n]\ninput %n int \"n\" = %x.size(0)\n";
  for (const char* call :
       {"%y = aten::neg(%n)", "%y = aten::full([%x], 1)", "%y = aten::add.Tensor(%x, [1, 2])", "%y = aten::cat(%x)",
        "%y = aten::sum.dim_IntList(%x, %x)", "%y = aten::zeros([2], dtype=%x)", "%y = aten::cat([%x, %n])",
        "%l = size::add(%x, 1)\n%y = aten::neg(%x)", "%l = list::get(%x, 0)\n%y = aten::neg(%x)",
        "%l = size::rank(%n)\n%y = aten::neg(%x)", "%y = aten::leaky_relu(%x, %x)", "%y = aten::index.Tensor(%x, [%n])",
        "%y = aten::div.Tensor_mode(%x, %x, rounding_mode=%x)", "%y = aten::max.dim(%x, %x)"}) {
    auto executor = Executor::create(load(inputs + call + "\noutput %y\n"), {});
    if (!executor) continue;
    EXPECT_FALSE(executor.value().run(std::array{at::zeros({3})})) << call;
  }
}

TEST(Executor, GraphsThatWorkersMustNotRunAreRefused) {
  const std::string x = "input %x leaf 0 float32 [n]\n";
  EXPECT_EQ(refusal(x + "%y = aten::from_file(\"/etc/passwd\", false, 4)").code, Errc::kUnsupported);
  EXPECT_EQ(refusal(x + "%y = aten::add_.Scalar(%x, 1)").code, Errc::kUnsupported);
  EXPECT_EQ(refusal(x + "%y = aten::rand([2])").code, Errc::kUnsupported);
  EXPECT_EQ(refusal(x + "%y = mylib::anything(%x)").code, Errc::kUnsupported);
  EXPECT_EQ(refusal(x + "%y = opaque::anything(%x)").code, Errc::kUnsupported);
  EXPECT_EQ(refusal(x + "input %p state \"weight\" float32 [2]", {at::zeros({2})}).code, Errc::kUnsupported);
  EXPECT_EQ(refusal(x + "input %k int \"counter\"").code, Errc::kUnsupported);
}

TEST(Executor, RandomOperatorsRunWhenAllowed) {
  const char* statements = "%y = aten::rand([4])\noutput %y\n";
  EXPECT_FALSE(Executor::create(load(statements), {}));
  const Executor executor = make(statements, {}, {.allow_random = true});
  at::manual_seed(3);
  const at::Tensor expected = at::rand({4});
  at::manual_seed(3);
  expect_same(only(executor.run({})), expected);
}

TEST(Executor, ASeedIsForOneRunAlone) {
  const Executor executor = make("%y = aten::randn([5])\noutput %y\n", {}, {.allow_random = true});
  EXPECT_TRUE(executor.draws());
  EXPECT_FALSE(make("%y = aten::ones([5])\noutput %y\n", {}).draws());
  at::manual_seed(3);
  const at::Tensor expected = at::randn({5});  // leaves one normal number over for the next call
  const at::Tensor next = at::randn({5});
  at::manual_seed(9);
  const at::Tensor untouched = at::randn({5});
  at::manual_seed(9);
  expect_same(only(executor.run({}, 3)), expected);
  expect_same(at::randn({5}), untouched);
  at::manual_seed(3);
  at::randn({5});
  EXPECT_TRUE(executor.run({}, 9));
  expect_same(at::randn({5}), next);
}

TEST(Executor, ConstantsThatAreNotTheGraphsAreRefused) {
  const at::Tensor constant = at::arange(3).to(at::kFloat);
  const std::string head = "input %c const \"self.mean\" float32 [3]";
  const std::string digest = " digest \"" + capture::content_digest(constant) + "\"";
  EXPECT_TRUE(Executor::create(load(head + digest), {constant}));
  EXPECT_EQ(refusal(head + digest, {constant + 1}).code, Errc::kMismatch);
  EXPECT_EQ(refusal(head, {}).code, Errc::kMismatch);
  EXPECT_EQ(refusal(head, {constant, constant}).code, Errc::kMismatch);
  EXPECT_EQ(refusal(head, {at::Tensor()}).code, Errc::kMismatch);
  EXPECT_EQ(refusal(head, {constant.to(at::kDouble)}).code, Errc::kMismatch);
  EXPECT_EQ(refusal(head, {at::zeros({4})}).code, Errc::kMismatch);
}

TEST(Executor, DigestsTellContentsAndNotLayouts) {
  const at::Tensor x = at::arange(6).to(at::kFloat).view({2, 3});
  EXPECT_EQ(capture::content_digest(x), capture::content_digest(x.t().contiguous().t()));
  EXPECT_NE(capture::content_digest(x), capture::content_digest(x.view({3, 2})));
  EXPECT_NE(capture::content_digest(x), capture::content_digest(x.view(at::kInt)));
  EXPECT_NE(capture::content_digest(x), capture::content_digest(x + 1));
  EXPECT_NE(capture::content_digest(at::zeros({0, 2})), capture::content_digest(at::zeros({2, 0})));
}

TEST(Executor, OutputsThatAreNoTensorsAreAnError) {
  const Executor executor = make("input %x leaf 0 float32 [n]\n%y = size::rank(%x)\noutput %y\n");
  EXPECT_EQ(executor.run(std::array{at::zeros({2})}).error().code, Errc::kUnsupported);
}

TEST(Executor, AnotherDefaultDtypeIsRefused) {
  c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const auto executor = Executor::create(load("%y = aten::zeros([2])"), {});
  c10::set_default_dtype(caffe2::TypeMeta::Make<float>());
  ASSERT_FALSE(executor);
  EXPECT_EQ(executor.error().code, Errc::kUnsupported);
}

TEST(Executor, FreesValuesAtTheirLastUse) {
  std::string statements = "input %x leaf 0 uint8 [n]\n%v0 = aten::bitwise_not(%x)\n";
  for (int i = 1; i < 64; ++i)
    statements += "%v" + std::to_string(i) + " = aten::bitwise_not(%v" + std::to_string(i - 1) + ")\n";
  const Executor executor = make(statements + "output %v63\n");
  const at::Tensor x = at::zeros({1 << 20}, at::kByte);
  const TensorMemory memory(1 << 30);
  ASSERT_TRUE(executor.run(std::array{x}));
  EXPECT_LE(memory.peak_bytes(), 3 << 20);  // an operand, a result, and some slack
}

TEST(Executor, RunsOverlapOnTwoThreads) {
  const at::Tensor mean = at::rand({1, 3, 1, 1});
  const Executor executor = make(kNormalise, {mean});
  const auto work = [&](int64_t offset) {
    for (int64_t i = 0; i < 50; ++i) {
      const at::Tensor x = at::full({1 + i % 3, 3, 4, 4}, (offset + i) % 256, at::kByte);
      const auto outputs = executor.run(std::array{x});
      ASSERT_TRUE(outputs);
      ASSERT_TRUE(at::equal(outputs.value()[0], at::sub(at::div(x.to(at::kFloat), 255), mean)));
    }
  };
  std::jthread first(work, 0);
  std::jthread second(work, 100);
}

}  // namespace
}  // namespace penstock::runtime
