// SPDX-License-Identifier: Apache-2.0
#include "runtime/calibrate.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "capture/capture.h"
#include "graph/ir_text.h"

namespace penstock::runtime {
namespace {

// A clock that nothing but the operators that this thread calls moves on.
class OperatorClock {
 public:
  // How long an operator takes.
  using Takes = std::function<std::chrono::seconds(std::string_view name)>;

  explicit OperatorClock(Takes takes) : takes_(std::move(takes)) {
    current_ = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin).scopes({at::RecordScope::FUNCTION}));
  }
  OperatorClock(const OperatorClock&) = delete;
  OperatorClock& operator=(const OperatorClock&) = delete;
  ~OperatorClock() {
    at::removeCallback(handle_);
    current_ = nullptr;
  }

  std::function<Instant()> function() const {
    return [this] { return now_; };
  }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    current_->now_ += current_->takes_(call.name());
    return nullptr;
  }

  static inline thread_local OperatorClock* current_ = nullptr;

  const Takes takes_;
  Instant now_{};
  at::CallbackHandle handle_{};
};

class Calibrated : public testing::Test {
 protected:
  void load(std::string_view statements, bool allow_random = false) {
    auto parsed = graph::parse_graph("penstock-ir 1\n" + std::string(statements));
    ASSERT_TRUE(parsed) << parsed.error().message;
    graph_ = std::move(parsed).value();
    capture::annotate(graph_);
    verdicts_ = graph::analyse_effects(graph_, {allow_random});
  }

  Result<graph::Calibration> run(std::vector<at::Tensor> leaves,
                                 std::vector<std::optional<at::Tensor>> constants = {}) {
    return calibrate(graph_, verdicts_, leaves, constants, {.round_count = 3, .seconds_max = 1});
  }
  Result<graph::Calibration> run(std::vector<at::Tensor> leaves, const OperatorClock& clock) {
    constexpr double kForEver = std::numeric_limits<double>::infinity();
    return calibrate(graph_, verdicts_, leaves, {},
                     {.round_count = 3, .seconds_max = kForEver, .clock = clock.function()});
  }

  const graph::ValueSize& of(const graph::Calibration& calibration, std::string_view name) {
    const auto found = std::find(graph_.value_names.begin(), graph_.value_names.end(), name);
    return calibration.values[static_cast<size_t>(found - graph_.value_names.begin())];
  }

  graph::Graph graph_;
  std::vector<graph::Verdict> verdicts_;
};

TEST_F(Calibrated, BytesAreThoseOfTheElementsAndViewsShareStorage) {
  load(R"(
input %x leaf 0 float32 [n, 4]
input %z leaf 1 float32 [n, 4]
%a = aten::neg(%x)
%v = aten::view(%a, [-1])
%w = aten::slice.Tensor(%a, 1, 0, 2)
%u = aten::slice.Tensor(%a, 1, 2, 4)
%u2 = aten::slice.Tensor(%a, 1, 2, 4)
%e = aten::expand(%x, [3, -1, -1])
%n = aten::sym_size.int(%x, 0)
%h = aten::to.dtype(%x, dtype:float16)
%t = aten::transpose.int(%a, 0, 1)
)");
  const at::Tensor x = at::zeros({8, 4});
  const auto calibration = run({x, x.view({8, 4})});
  ASSERT_TRUE(calibration) << calibration.error().message;
  const auto& c = calibration.value();
  EXPECT_EQ(of(c, "a").bytes, 128);
  EXPECT_EQ(of(c, "w").bytes, 64);
  EXPECT_EQ(of(c, "e").bytes, 384);
  EXPECT_EQ(of(c, "h").bytes, 64);
  EXPECT_EQ(of(c, "n"), graph::ValueSize{});
  EXPECT_EQ(of(c, "v").storage, of(c, "a").storage);
  EXPECT_EQ(of(c, "t").storage, of(c, "a").storage);
  EXPECT_EQ(of(c, "z").storage, of(c, "x").storage);
  EXPECT_EQ(of(c, "u").storage, of(c, "u2").storage);
  EXPECT_NE(of(c, "w").storage, of(c, "a").storage);
  EXPECT_NE(of(c, "w").storage, of(c, "u").storage);  // the two halves
  EXPECT_NE(of(c, "a").storage, of(c, "x").storage);
}

TEST_F(Calibrated, NodesThatStayAreNotRun) {
  load(R"(
input %x leaf 0 float32 [n]
input %p state "p" float32 [7]
%a = aten::neg(%x)
%b = aten::add.Tensor(%a, %p)
%u = mylib::unknown(%x)
%d = aten::mul_.Scalar(%p, 2)
)");
  const at::Tensor state = at::ones({7});
  for (const auto& constant : {std::optional<at::Tensor>(), std::optional<at::Tensor>(state)}) {
    const auto calibration = run({at::zeros({3})}, {constant});
    ASSERT_TRUE(calibration) << calibration.error().message;
    EXPECT_GT(calibration.value().node_s[0], 0);
    for (size_t node : {1, 2, 3}) EXPECT_EQ(calibration.value().node_s[node], 0) << node;
  }
  EXPECT_TRUE(at::equal(state, at::ones({7})));
}

// Seconds. Page faults are real here, and take a real time off that is far less.
constexpr double kFaults = 100;

TEST_F(Calibrated, NodeHasTheTimeOfItsOwnOperator) {
  load(R"(
input %x leaf 0 float32 [n, n]
%a = aten::neg(%x)
%b = aten::mm(%x, %x)
%u = mylib::unknown(%x)
)");
  const OperatorClock clock([](std::string_view name) {
    return std::chrono::seconds(name == "aten::mm" ? 5000 : name == "aten::neg" ? 1000 : 0);
  });
  const auto calibration = run({at::rand({40, 40})}, clock);
  ASSERT_TRUE(calibration) << calibration.error().message;
  const auto& node_s = calibration.value().node_s;
  ASSERT_EQ(node_s.size(), 3u);
  EXPECT_NEAR(node_s[0], 1000, kFaults);
  EXPECT_NEAR(node_s[1], 5000, kFaults);
  EXPECT_EQ(node_s[2], 0) << "it was not run";
  EXPECT_EQ(calibration.value().trainer_node_s, (std::vector<double>{1000, 5000, 0}));
}

TEST_F(Calibrated, TrainerWithMoreThreadsIsMeasuredWithThem) {
  load("input %x leaf 0 float32 [n, n]\n%a = aten::mm(%x, %x)\n");
  const OperatorClock clock([](std::string_view name) {
    return std::chrono::seconds(name == "aten::mm" ? 10'000 / at::get_num_threads() : 0);
  });
  const int thread_count = at::get_num_threads();
  at::set_num_threads(2);
  const auto with_two = run({at::rand({64, 64})}, clock);
  EXPECT_EQ(at::get_num_threads(), 2);
  at::set_num_threads(1);
  const auto with_one = run({at::rand({64, 64})}, clock);
  at::set_num_threads(thread_count);
  ASSERT_TRUE(with_two && with_one);
  EXPECT_EQ(with_two.value().trainer_node_s, std::vector<double>{5000});
  EXPECT_NEAR(with_two.value().node_s.at(0), 10'000, kFaults);
  EXPECT_EQ(with_one.value().trainer_node_s, std::vector<double>{10'000});
  EXPECT_NEAR(with_one.value().node_s.at(0), 10'000, kFaults);
}

TEST_F(Calibrated, WorkersHaveNoPageFaultsOfATrainersHeap) {
  load("input %x leaf 0 float32 [n]\n%a = aten::neg(%x)\n");
  const OperatorClock clock([](std::string_view name) { return std::chrono::seconds(name == "aten::neg" ? 1000 : 0); });
  const int thread_count = at::get_num_threads();
  at::set_num_threads(1);
  const auto calibration = run({at::zeros({40 << 20})}, clock);  // of which no heap keeps the memory
  at::set_num_threads(thread_count);
  ASSERT_TRUE(calibration) << calibration.error().message;
  EXPECT_EQ(calibration.value().trainer_node_s, std::vector<double>{1000});
  EXPECT_LT(calibration.value().node_s.at(0), 1000);
}

TEST_F(Calibrated, WhatADeviceThatIsNotHereTakesFollowsFromTheBytes) {
  load(R"(
input %x leaf 0 float32 [n]
%a = aten::neg(%x) on xpu:3 [float32]
%b = aten::neg(%a) on xpu:3 [float32]
)");
  for (graph::Verdict& verdict : verdicts_) verdict.movable = true;
  const auto small = run({at::zeros({10})});
  const auto large = run({at::zeros({100'000})});
  ASSERT_TRUE(small && large);
  ASSERT_EQ(small.value().trainer_node_s.size(), 2u);
  EXPECT_GT(small.value().trainer_node_s[0], 0);
  EXPECT_GT(large.value().trainer_node_s[1] - small.value().trainer_node_s[1], 0);
  EXPECT_EQ(large.value().copy_bytes_per_s, 0);
}

TEST_F(Calibrated, GeneratorGradModeAndThreadCountAreAsTheyWere) {
  load("input %x leaf 0 float32 [n]\n%a = aten::bernoulli(%x)\n%b = aten::dropout(%x, 0.5, true)\n",
       /*allow_random=*/true);
  at::manual_seed(11);
  const at::Tensor expected = at::rand({4});
  at::manual_seed(11);
  const int thread_count = at::get_num_threads();
  const auto calibration = run({at::zeros({100})});
  ASSERT_TRUE(calibration) << calibration.error().message;
  EXPECT_GT(calibration.value().node_s[0], 0);
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
  EXPECT_TRUE(c10::GradMode::is_enabled());
  EXPECT_EQ(at::get_num_threads(), thread_count);
}

TEST_F(Calibrated, GeneratorIsPutBackWhenAnOperatorFails) {
  load("input %x leaf 0 float32 [n]\n%a = aten::bernoulli(%x)\n%b = aten::view(%x, [7])\n", /*allow_random=*/true);
  at::manual_seed(11);
  const at::Tensor expected = at::rand({4});
  at::manual_seed(11);
  const auto calibration = run({at::zeros({100})});
  ASSERT_FALSE(calibration);
  EXPECT_EQ(calibration.error().code, Errc::kFailed);
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
}

TEST_F(Calibrated, LeavesAndConstantsThatDoNotFitAreRefused) {
  load(R"(
input %x leaf 0 float32 [n]
input %c const "c" float32 [3]
%a = aten::add.Tensor(%x, %c)
)");
  EXPECT_TRUE(run({at::zeros({3})}, {at::zeros({3})}));
  EXPECT_EQ(run({at::zeros({3}, at::kLong)}, {at::zeros({3})}).error().code, Errc::kMismatch);
  EXPECT_EQ(run({at::zeros({3})}, {at::zeros({4})}).error().code, Errc::kMismatch);
  EXPECT_EQ(run({at::zeros({3})}, {std::nullopt}).error().code, Errc::kMismatch);
  EXPECT_EQ(run({at::zeros({3})}, {}).error().code, Errc::kMismatch);
  EXPECT_EQ(run({}, {at::zeros({3})}).error().code, Errc::kMismatch);
  verdicts_.clear();
  EXPECT_EQ(run({at::zeros({3})}, {at::zeros({3})}).error().code, Errc::kMismatch);
}

}  // namespace
}  // namespace penstock::runtime
