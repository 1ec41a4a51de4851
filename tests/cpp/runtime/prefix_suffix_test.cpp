// SPDX-License-Identifier: Apache-2.0
// The oracle of the cut: on random programs, prefix then suffix gives the whole program's bits, whatever the cut.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "capture/capture.h"
#include "capture/schema.h"
#include "expect_same.h"
#include "graph/effects.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "graph/plan.h"
#include "runtime/calibrate.h"
#include "runtime/executor.h"
#include "runtime/kernel_families.h"

namespace penstock::runtime {
namespace {

uint32_t seed() {
  const char* given = std::getenv("PENSTOCK_TEST_SEED");
  return given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : 20240607;
}

// Programs over [n, 4] tensors, so that any operator fits any value.
class Program {
 public:
  explicit Program(std::mt19937& random) : random_(random) {
    const at::Tensor mean = at::rand({4});
    constants_ = {mean, at::rand({4, 4})};
    text_ =
        "penstock-ir 1\ninput %x leaf 0 float32 [n, 4]\ninput %y leaf 1 uint8 [n, 4]\n"
        "input %c const \"mean\" float32 [4] digest \"" +
        capture::content_digest(mean) +
        "\"\n"
        "input %p state \"weight\" float32 [4, 4]\ninput %n int \"n\" = %x.size(0)\n";
    tensors_ = {"x"};
    statement("%f = aten::to.dtype(%y, dtype:float32)");
    tensors_.push_back("f");
    const size_t count = 3 + pick(14);
    for (size_t i = 0; i < count; ++i) add();
    // Everything is an output, so that no wrong value goes unseen.
    for (const std::string& name : tensors_) text_ += "output %" + name + "\n";
  }

  const std::string& text() const { return text_; }
  const std::vector<at::Tensor>& constants() const { return constants_; }

 private:
  size_t pick(size_t count) { return random_() % count; }
  // Recent values are taken more often, so that writes meet the views that were just made.
  std::string tensor() {
    const size_t recent = std::min<size_t>(tensors_.size(), 3);
    return pick(2) == 0 ? tensors_[pick(tensors_.size())] : tensors_[tensors_.size() - 1 - pick(recent)];
  }

  void statement(const std::string& call) {
    text_ += call;
    // Groups are calls: neighbours, as a rule. Now and then two that lie apart, which only plans of cycles can have.
    if (pick(2) == 0) text_ += " group " + std::to_string(pick(16) == 0 ? pick(8) : next_) + " \"call\"";
    text_ += "\n";
  }

  void add() {
    const std::string v = "v" + std::to_string(next_++);
    const std::string a = "%" + tensor();
    const std::string b = "%" + tensor();
    switch (pick(24)) {
      case 0: statement("%" + v + " = aten::add.Tensor(" + a + ", " + b + ", alpha=2)"); break;
      case 1: statement("%" + v + " = aten::sub.Tensor(" + a + ", %c)"); break;
      case 2: statement("%" + v + " = aten::mm(" + a + ", %p)"); break;
      case 3: statement("%" + v + " = aten::sigmoid(" + a + ")"); break;
      case 4: statement("%" + v + " = aten::softmax.int(" + a + ", 1)"); break;
      case 5: statement("%" + v + " = aten::cumsum(" + a + ", 0)"); break;
      case 6: statement("%" + v + " = aten::log1p(" + a + ")"); break;
      case 7: statement("%" + v + " = aten::view(" + a + ", [%n, 4])"); break;
      case 20:
      case 21: statement("%" + v + " = aten::reshape(" + a + ", [-1, 4])"); break;
      case 22: statement("%" + v + " = aten::sub_.Tensor(" + a + ", %c)"); break;
      case 8: statement("%" + v + " = aten::flip(" + a + ", [0])"); break;
      case 9:
        statement("%" + v + "a, %" + v + "b = aten::sort(" + a + ", 1)");
        statement("%" + v + " = aten::gather(" + b + ", 1, %" + v + "b)");
        break;
      case 10:
        statement("%" + v + "l = aten::split.Tensor(" + a + ", 2, 1)");
        statement("%" + v + "a = list::get(%" + v + "l, 0)");
        statement("%" + v + "b = list::get(%" + v + "l, 1)");
        statement("%" + v + " = aten::cat([%" + v + "b, %" + v + "a], 1)");
        break;
      case 11:
        statement("%" + v + "r = aten::arange(%n)");
        statement("%" + v + "c = aten::unsqueeze(%" + v + "r, 1)");
        statement("%" + v + " = aten::add.Tensor(" + a + ", %" + v + "c)");
        break;
      case 12:
        statement("%" + v + "n = aten::sym_size.int(" + a + ", 0)");
        statement("%" + v + "m = size::mul(%" + v + "n, 4)");
        statement("%" + v + "t = aten::div.Scalar(" + b + ", %" + v + "m)");
        statement("%" + v + " = aten::clamp(%" + v + "t, -1.5, none)");
        break;
      case 13:
        statement("%" + v + "t = aten::neg(" + a + ")");
        statement("%" + v + " = aten::mul_.Tensor(%" + v + "t, " + b + ")");
        break;
      case 14: statement("%" + v + " = aten::add_.Scalar(" + a + ", 0.5)"); break;
      case 15: statement("%" + v + " = aten::layer_norm(" + a + ", [4], %c, none)"); break;
      case 16:
        statement("%" + v + "w = aten::gt.Tensor(" + a + ", " + b + ")");
        statement("%" + v + " = aten::where.self(%" + v + "w, " + a + ", %c)");
        break;
      case 17:
        statement("%" + v + "t = aten::transpose.int(" + a + ", 0, 1)");
        statement("%" + v + "e = aten::exp(%" + v + "t)");
        statement("%" + v + " = aten::transpose.int(%" + v + "e, 0, 1)");
        break;
      case 18:
        statement("%" + v + "w = aten::isfinite(" + a + ")");
        statement("%" + v + " = aten::masked_fill.Scalar(" + b + ", %" + v + "w, 0.25)");
        break;
      default: statement("%" + v + " = aten::mul.Tensor(" + a + ", %c)"); break;
    }
    tensors_.push_back(v);
  }

  std::mt19937& random_;
  std::string text_;
  std::vector<std::string> tensors_;
  std::vector<at::Tensor> constants_;
  size_t next_ = 0;
};

std::vector<at::Tensor> make_leaves() { return {at::randn({5, 4}).abs(), at::randint(0, 256, {5, 4}, at::kByte)}; }

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copied;
  copied.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) copied.push_back(tensor.clone());
  return copied;
}

// The trainer's part: the kept groups, with the boundary values as further leaves.
graph::Graph suffix_of(const graph::Graph& whole, const graph::Plan& plan) {
  graph::Graph suffix = whole;
  suffix.nodes.clear();
  suffix.traits.clear();
  std::vector<bool> is_kept(whole.nodes.size());
  for (const graph::PlanGroup& group : plan.kept)
    for (const uint32_t node : group.nodes) is_kept[node] = true;
  for (size_t i = 0; i < whole.nodes.size(); ++i)
    if (is_kept[i]) suffix.nodes.push_back(whole.nodes[i]);
  for (size_t i = 0; i < plan.boundary.size(); ++i) {
    graph::Input input;
    input.value = plan.boundary[i];
    input.leaf_index = static_cast<uint32_t>(100 + i);
    suffix.inputs.push_back(input);
  }
  return suffix;
}

// A worker of another kind runs the exact part, and the trainer what is left: together they give the prefix's bits.
void check_split(const std::string& text, const std::vector<at::Tensor>& constants,
                 const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& expected,
                 const std::string& context) {
  auto rest = PrefixRest::create(text, constants);
  if (!rest) return;  // no exact part
  graph::Graph prefix = graph::parse_graph(text).value();
  capture::annotate(prefix);
  std::vector<bool> is_exact;
  for (const NumericFamily family : kernel_families(prefix)) is_exact.push_back(family == NumericFamily::kArithmetic);
  auto front = graph::front_of(prefix, graph::split_prefix(prefix, is_exact));
  ASSERT_TRUE(front) << front.error().message << context;
  graph::Graph part = std::move(front).value();
  std::vector<at::Tensor> of_part;
  for (const size_t index : graph::constants_of(part, prefix)) of_part.push_back(constants.at(index));
  const auto worker = Executor::create(std::move(part), of_part);
  ASSERT_TRUE(worker) << worker.error().message << context;
  const auto given = worker.value().run(copies(leaves));
  ASSERT_TRUE(given) << given.error().message << context;
  const auto outputs = rest.value().run(copies(leaves), copies(given.value()));
  ASSERT_TRUE(outputs) << outputs.error().message << context;
  ASSERT_EQ(outputs.value().size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) expect_same(outputs.value()[i], expected[i], context);
}

void check_cut(const Program& program, const graph::Graph& whole, std::span<const graph::Verdict> verdicts,
               const graph::Calibration& calibration, const graph::Prices& prices, graph::CutMode mode,
               const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& expected, size_t& moved_count) {
  const auto plan = graph::make_plan(whole, verdicts, calibration, prices, mode);
  ASSERT_TRUE(plan) << plan.error().message;
  moved_count += plan.value().moved.size();
  const auto extracted = graph::extract_prefix(whole, plan.value());
  ASSERT_TRUE(extracted) << extracted.error().message;
  // The worker knows the text alone.
  const std::string text = graph::print_graph(extracted.value());
  const std::string context = program.text() + "\nprefix:\n" + text;
  auto received = graph::parse_graph(text);
  ASSERT_TRUE(received) << received.error().message << context;
  std::vector<at::Tensor> constants;
  for (const graph::Input& input : received.value().inputs)
    if (input.kind == graph::InputKind::kConst) constants.push_back(program.constants()[0]);
  const auto prefix = Executor::create(std::move(received).value(), constants);
  ASSERT_TRUE(prefix) << prefix.error().message << context;
  const auto boundary = prefix.value().run(copies(leaves));
  ASSERT_TRUE(boundary) << boundary.error().message << context;

  check_split(text, constants, leaves, boundary.value(), context);

  std::vector<at::Tensor> suffix_leaves = copies(leaves);
  suffix_leaves.resize(100);
  graph::Graph suffix = suffix_of(whole, plan.value());
  for (size_t i = 0; i < boundary.value().size(); ++i) {
    // Values that cross arrive in memory of their own.
    suffix_leaves.push_back(boundary.value()[i].clone());
    graph::Input& input = suffix.inputs[suffix.inputs.size() - boundary.value().size() + i];
    input.dtype = *capture::dtype_from_torch(boundary.value()[i].scalar_type());
    for (const int64_t size : boundary.value()[i].sizes()) input.sizes.emplace_back(size);
  }
  // A raw leaf that the plan does not list must not be read for its contents.
  for (uint32_t leaf = 0; leaf < leaves.size(); ++leaf)
    if (!std::binary_search(plan.value().raw_leaves.begin(), plan.value().raw_leaves.end(), leaf))
      suffix_leaves[leaf].fill_(77);
  const auto trainer =
      Executor::create(std::move(suffix), copies(program.constants()), {.allow_random = false, .allow_state = true});
  ASSERT_TRUE(trainer) << trainer.error().message << context;
  const auto outputs = trainer.value().run(suffix_leaves);
  ASSERT_TRUE(outputs) << outputs.error().message << context;
  for (size_t i = 0; i < expected.size(); ++i) expect_same(outputs.value()[i], expected[i], context);
}

TEST(PrefixSuffix, TogetherGiveTheBitsOfTheWhole) {
  std::mt19937 random(seed());
  RecordProperty("seed", static_cast<int>(seed()));
  at::manual_seed(seed());
  size_t moved_count = 0;
  for (int round = 0; round < 120 && !testing::Test::HasFatalFailure(); ++round) {
    SCOPED_TRACE("seed " + std::to_string(seed()) + ", round " + std::to_string(round));
    const Program program(random);
    auto parsed = graph::parse_graph(program.text());
    ASSERT_TRUE(parsed) << parsed.error().message << program.text();
    graph::Graph whole = std::move(parsed).value();
    capture::annotate(whole);
    const std::vector<at::Tensor> leaves = make_leaves();
    const auto executor =
        Executor::create(whole, copies(program.constants()), {.allow_random = false, .allow_state = true});
    ASSERT_TRUE(executor) << executor.error().message << program.text();
    const auto expected = executor.value().run(copies(leaves));
    ASSERT_TRUE(expected) << expected.error().message << program.text();
    const auto verdicts = graph::analyse_effects(whole, {});
    const std::vector<std::optional<at::Tensor>> constants(program.constants().begin(), program.constants().end());
    const auto calibration = calibrate(whole, verdicts, leaves, constants, {.round_count = 1, .seconds_max = 1});
    ASSERT_TRUE(calibration) << calibration.error().message << program.text();
    graph::Prices prices;
    prices.link_bytes_per_s = round % 2 == 0 ? 1e12 : 1e6;
    for (const auto mode : {graph::CutMode::kAuto, graph::CutMode::kMaximal, graph::CutMode::kNone})
      check_cut(program, whole, verdicts, calibration.value(), prices, mode, leaves, expected.value(), moved_count);
  }
  EXPECT_GT(moved_count, 120u) << "the random programs are too dull to test anything";
}

}  // namespace
}  // namespace penstock::runtime
