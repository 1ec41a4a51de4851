// SPDX-License-Identifier: Apache-2.0
// Plans against brute force: on small random graphs every choice of groups is priced by a second, plain reading of the
// rules, and the plan must be the cheapest of those that can be run.

#include "graph/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "../graph/random_problem.h"
#include "capture/capture.h"
#include "graph/cut_model.h"
#include "graph/ir_text.h"

namespace penstock::capture {
namespace {

// The rules once more, by repetition until nothing changes. `moved` holds unit indices of the model, which is asked for
// its units and nothing else.
struct Reading {
  bool is_valid = true;
  graph::Ticks price = 0;
  int64_t bytes = 0;
};

Reading read_choice(const graph::Problem& problem, const graph::CutModel& model, const graph::Choice& moved) {
  const graph::Graph& graph = problem.graph;
  Reading reading;
  std::vector<size_t> unit_of(graph.nodes.size());
  for (size_t unit = 0; unit < model.units().size(); ++unit)
    for (const uint32_t node : model.units()[unit].nodes) unit_of[node] = unit;
  std::map<graph::ValueId, size_t> maker;
  for (size_t node = 0; node < graph.nodes.size(); ++node) maker[graph.nodes[node].results[0]] = node;
  const auto both = [&](size_t node) { return is_replicable(problem.verdicts[node]); };

  // The side that computes each node.
  std::set<size_t> trainer_units;
  std::set<size_t> worker_nodes;
  for (size_t unit = 0; unit < model.units().size(); ++unit) {
    if (model.units()[unit].kind != graph::UnitKind::kReplicable && !moved[unit]) trainer_units.insert(unit);
    if (moved[unit]) worker_nodes.insert(model.units()[unit].nodes.begin(), model.units()[unit].nodes.end());
  }
  const auto read_by_trainer = [&](graph::ValueId value) {
    for (const graph::Output& output : graph.outputs)
      if (output.value == value) return true;
    for (size_t node = 0; node < graph.nodes.size(); ++node) {
      bool reads = false;
      for_each_operand(graph.nodes[node], [&](graph::ValueId operand) { reads = reads || operand == value; });
      const bool wants_contents = graph.traits[node].purity != graph::Purity::kMetadata || maker.contains(value);
      const bool is_inside = maker.contains(value) && unit_of[maker[value]] == unit_of[node];
      if (reads && wants_contents && !is_inside && trainer_units.contains(unit_of[node])) return true;
    }
    return false;
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& [value, node] : maker) {
      if (model.units()[unit_of[node]].kind == graph::UnitKind::kReplicable && read_by_trainer(value))
        changed = trainer_units.insert(unit_of[node]).second || changed;
    }
    for (const size_t reader : std::set<size_t>(worker_nodes)) {
      for_each_operand(graph.nodes[reader], [&](graph::ValueId operand) {
        if (maker.contains(operand) && both(maker[operand]))
          changed = worker_nodes.insert(maker[operand]).second || changed;
      });
    }
  }

  // Whether it can be run.
  for (size_t unit = 0; unit < moved.size(); ++unit)
    if (moved[unit] && model.units()[unit].kind != graph::UnitKind::kFree) reading.is_valid = false;
  for (const size_t reader : worker_nodes)
    for_each_operand(graph.nodes[reader], [&](graph::ValueId operand) {
      if (maker.contains(operand) && !worker_nodes.contains(maker[operand])) reading.is_valid = false;
    });

  // The values that cross.
  std::map<uint32_t, int64_t> priced;
  std::map<uint32_t, int64_t> written;
  std::map<uint32_t, int64_t> crossing;
  for (graph::ValueId value = 0; value < graph.value_names.size(); ++value) {
    const bool is_leaf = graph.inputs.size() > value && graph.inputs[value].kind == graph::InputKind::kLeaf;
    const bool is_moved = maker.contains(value) && moved[unit_of[maker[value]]];
    if (!(is_leaf || is_moved) || !read_by_trainer(value)) continue;
    if (is_moved && problem.graph.traits[maker[value]].result_kinds[0] != graph::ValueKind::kTensor)
      reading.is_valid = false;
    const graph::ValueSize& size = problem.calibration.values[value];
    if (size.storage == graph::ValueSize::kNoStorage) continue;
    crossing[size.storage] = size.bytes;
    if (!(is_leaf && problem.prices.raw_stays)) priced[size.storage] = size.bytes;
    if (is_moved) written[size.storage] = size.bytes;
  }
  for (const auto& [storage, bytes] : crossing) reading.bytes += bytes;
  const graph::Prices& prices = problem.prices;
  for (const auto& [storage, bytes] : priced)
    reading.price += graph::to_ticks(static_cast<double>(bytes) / prices.link_bytes_per_s) +
                     graph::to_ticks(static_cast<double>(bytes) * prices.receive_byte_s) +
                     graph::to_ticks(prices.worker_second * link_seconds(prices, bytes).worker_s / prices.worker_count);
  const auto worker_ticks = [&](double seconds) {
    return graph::to_ticks(prices.worker_second * (seconds * prices.worker_scale) / prices.worker_count);
  };
  for (const auto& [storage, bytes] : written) {
    reading.price += graph::to_ticks(static_cast<double>(bytes) / prices.read_bytes_per_s);
    reading.price +=
        graph::to_ticks(prices.worker_second * memory_seconds(prices, bytes).worker_s / prices.worker_count);
  }
  for (const size_t node : worker_nodes) reading.price += worker_ticks(problem.calibration.node_s[node]);
  for (const size_t unit : trainer_units)
    if (model.units()[unit].kind != graph::UnitKind::kFixed)
      for (const uint32_t node : model.units()[unit].nodes)
        reading.price += graph::to_ticks(model.trainer_node_s(node));
  return reading;
}

TEST(Plan, IsTheCheapestOfAllChoicesThatCanRun) {
  std::mt19937 random(graph::seed());
  RecordProperty("seed", static_cast<int>(graph::seed()));
  int moving_count = 0;
  for (int round = 0; round < 3'000; ++round) {
    const graph::Problem problem = graph::random_problem(random);
    const graph::CutModel model(problem.graph, problem.verdicts, problem.calibration, problem.prices);
    const auto context = [&] {
      return "seed " + std::to_string(graph::seed()) + ", round " + std::to_string(round) + "\n" +
             graph::print_graph(problem.graph);
    };
    graph::Ticks best = std::numeric_limits<graph::Ticks>::max();
    size_t most_moved = 0;
    for (uint32_t bits = 0; bits < 1u << model.units().size(); ++bits) {
      graph::Choice choice(model.units().size());
      for (size_t unit = 0; unit < choice.size(); ++unit) choice[unit] = (bits >> unit & 1) != 0;
      const Reading reading = read_choice(problem, model, choice);
      ASSERT_EQ(model.is_valid(choice), reading.is_valid) << context();
      if (!reading.is_valid) continue;
      const graph::Cut cut = model.cut(choice);
      ASSERT_EQ(model.price(cut), reading.price) << context();
      ASSERT_EQ(cut.boundary_bytes, reading.bytes) << context();
      best = std::min(best, reading.price);
      most_moved = std::max(most_moved, static_cast<size_t>(std::popcount(bits)));
    }
    const graph::Choice cheapest = model.cheapest();
    ASSERT_TRUE(model.is_valid(cheapest)) << context();
    ASSERT_EQ(model.price(model.cut(cheapest)), best) << context();
    moving_count += std::count(cheapest.begin(), cheapest.end(), true) > 0 ? 1 : 0;
    const graph::Choice maximal = model.shrink_to_valid(model.everything());
    ASSERT_TRUE(model.is_valid(maximal)) << context();
    ASSERT_EQ(static_cast<size_t>(std::count(maximal.begin(), maximal.end(), true)), most_moved) << context();
  }
  EXPECT_GT(moving_count, 300) << "the random problems are too dull to test anything";
}

class PlanOf : public testing::Test {
 protected:
  void load(std::string_view text, bool allow_random = false) {
    auto parsed = graph::parse_graph(text);
    ASSERT_TRUE(parsed) << parsed.error().message;
    graph_ = std::move(parsed).value();
    annotate(graph_);
    verdicts_ = analyse_effects(graph_, {allow_random});
    calibration_.node_s.assign(graph_.nodes.size(), 1e-3);
    calibration_.values.clear();
    for (graph::ValueId value = 0; value < graph_.value_names.size(); ++value)
      calibration_.values.push_back({1000, value});
  }

  void set_bytes(std::string_view name, int64_t bytes) { calibration_.values[id(name)].bytes = bytes; }

  graph::ValueId id(std::string_view name) {
    for (graph::ValueId value = 0; value < graph_.value_names.size(); ++value)
      if (graph_.value_names[value] == name) return value;
    ADD_FAILURE() << name;
    return 0;
  }

  graph::Plan plan(graph::CutMode mode = graph::CutMode::kAuto) {
    auto made = graph::make_plan(graph_, verdicts_, calibration_, prices_, mode);
    EXPECT_TRUE(made) << made.error().message;
    return made.value();
  }

  static std::vector<std::string> labels(const std::vector<graph::PlanGroup>& groups) {
    std::vector<std::string> labels;
    labels.reserve(groups.size());
    for (const graph::PlanGroup& group : groups) labels.push_back(group.label);
    return labels;
  }

  static const graph::PlanGroup& labelled(const std::vector<graph::PlanGroup>& groups, std::string_view label) {
    for (const graph::PlanGroup& group : groups)
      if (group.label == label) return group;
    ADD_FAILURE() << label;
    return groups.front();
  }

  graph::Graph graph_;
  std::vector<graph::Verdict> verdicts_;
  graph::Calibration calibration_;
  graph::Prices prices_;
};

constexpr std::string_view kNormalise = R"(penstock-ir 1
input %x leaf 0 uint8 [s0, 3]
input %w state "w" float32 [3, 3]
%f = aten::to.dtype(%x, dtype:float32) group 0 "float"
%n = aten::div.Scalar(%f, 255) group 1 "normalise"
%y = aten::mm(%n, %w) group 2 "mm"
output %y
)";

TEST_F(PlanOf, CheapBytesMoveTheWholePrefix) {
  load(kNormalise);
  const graph::Plan made = plan();
  EXPECT_EQ(labels(made.moved), (std::vector<std::string>{"float", "normalise"}));
  EXPECT_EQ(labels(made.kept), (std::vector<std::string>{"mm"}));
  EXPECT_EQ(made.boundary_names, (std::vector<std::string>{"n"}));
  EXPECT_TRUE(made.raw_leaves.empty());
  EXPECT_EQ(made.raw_bytes, 1000);
  EXPECT_EQ(made.boundary_bytes, 1000);
  EXPECT_DOUBLE_EQ(made.worker_s, 2e-3);
  EXPECT_EQ(made.kept[0].reason, "aten::mm (mm) reads w, a parameter or state of the model");
}

TEST_F(PlanOf, InflatingValueStaysAndTheReasonHasThePrice) {
  load(kNormalise);
  set_bytes("x", 1'000'000);
  set_bytes("f", 40'000'000);
  set_bytes("n", 40'000'000);
  const graph::Plan made = plan();
  EXPECT_TRUE(made.moved.empty());
  EXPECT_EQ(made.raw_leaves, (std::vector<uint32_t>{0}));
  EXPECT_EQ(made.boundary_bytes, 1'000'000);
  EXPECT_EQ(made.maximal_bytes, 40'000'000);
  // 39 MB more at 4 GB/s is 9.75 ms; two operators of 1 ms and 5 us come back, and cost a quarter of 2 ms in a worker.
  EXPECT_EQ(labelled(made.kept, "normalise").reason,
            "it could move, but is cheaper in the trainer: moving it would cost 8.24 ms more per batch; "
            "40000000 bytes would be sent instead of 1000000");
}

TEST_F(PlanOf, ModesMoveAllThatCanOrNothing) {
  load(kNormalise);
  set_bytes("n", 40'000'000);
  EXPECT_EQ(plan(graph::CutMode::kMaximal).moved.size(), 2u);
  const graph::Plan none = plan(graph::CutMode::kNone);
  EXPECT_TRUE(none.moved.empty());
  EXPECT_EQ(none.kept[0].reason, "cut=\"none\" is set");
}

TEST_F(PlanOf, CutThatSavesLessThanACutCostsIsNotMade) {
  load(kNormalise);
  prices_.raw_stays = true;
  ASSERT_EQ(plan().moved.size(), 2u);
  prices_.cut_s = 1e-3;  // two operators of 1 ms and 5 us leave the trainer, for a quarter of 2 ms and a few us
  EXPECT_EQ(plan().moved.size(), 2u);
  prices_.cut_s = 2e-3;
  const graph::Plan made = plan();
  EXPECT_TRUE(made.moved.empty());
  EXPECT_EQ(labelled(made.kept, "float").reason,
            "it could move, but all profitable moves together save only 1.51 ms per batch, and cutting costs the "
            "trainer 2 ms");
  EXPECT_EQ(plan(graph::CutMode::kMaximal).moved.size(), 2u);
  prices_.loads = graph::Loads{.trainer_s = 10e-3, .worker_s = 0, .cpus = 0};
  EXPECT_EQ(plan().moved.size(), 2u);  // steps are shorter by all that the trainer is rid of
  prices_.cut_s = 2.2e-3;
  EXPECT_TRUE(plan().moved.empty());
  prices_.cut_s = -1;
  EXPECT_FALSE(graph::make_plan(graph_, verdicts_, calibration_, prices_, graph::CutMode::kAuto));
}

// Where a draw is made says which numbers it gives, so a price that is measured must not decide it.
TEST_F(PlanOf, DrawsThatMayMoveDoWhateverThePrice) {
  load(R"(penstock-ir 1
input %x leaf 0 float32 [s0, 3]
input %w state "w" float32 [3, 3]
%f = aten::mul.Scalar(%x, 2) group 0 "mul"
%r = aten::rand_like(%f) group 1 "draw"
%n = aten::neg(%r) group 2 "neg"
%s = aten::mm(%r, %w) group 3 "mm"
%q = aten::rand_like(%s) group 4 "late"
output %n
output %q
)",
       /*allow_random=*/true);
  set_bytes("r", 400'000'000);
  set_bytes("n", 800'000'000);
  const graph::Plan made = plan();
  EXPECT_EQ(labels(made.moved), (std::vector<std::string>{"mul", "draw"}));
  EXPECT_EQ(made.boundary_names, (std::vector<std::string>{"r"}));
  prices_.loads = graph::Loads{.trainer_s = 1e-3, .worker_s = 10};
  EXPECT_EQ(labels(plan().moved), (std::vector<std::string>{"mul", "draw"}));
  EXPECT_TRUE(plan(graph::CutMode::kNone).moved.empty());
}

TEST_F(PlanOf, GroupThatHoldsOneFixedNodeStaysWhole) {
  load(R"(penstock-ir 1
input %x leaf 0 float32 [s0, 3]
input %w state "w" float32 [3, 3]
%a = aten::neg(%x) group 0 "call"
%y = aten::mm(%a, %w) group 0 "call"
output %y
)");
  const graph::Plan made = plan(graph::CutMode::kMaximal);
  EXPECT_TRUE(made.moved.empty());
  EXPECT_EQ(made.kept[0].reason, "part of it must stay: aten::mm (call) reads w, a parameter or state of the model");
}

TEST_F(PlanOf, ShapeComputationsRunOnBothSidesAndDoNotCross) {
  load(R"(penstock-ir 1
input %x leaf 0 float32 [s0, 4]
input %w state "w" float32 [4]
input %n int "n" = %x.size(0)
%p = aten::arange(%n) group 0 "positions"
%q = aten::unsqueeze(%p, 1) group 1 "column"
%a = aten::add.Tensor(%x, %q) group 2 "worker's"
%b = aten::mul.Tensor(%w, %q) group 3 "trainer's"
%y = aten::add.Tensor(%a, %b) group 4 "sum"
output %y
)");
  const graph::Plan made = plan(graph::CutMode::kMaximal);
  EXPECT_EQ(labels(made.moved), (std::vector<std::string>{"worker's"}));
  EXPECT_TRUE(labelled(made.kept, "positions").replicated);
  EXPECT_EQ(made.boundary_names, (std::vector<std::string>{"a"}));
  EXPECT_DOUBLE_EQ(made.worker_s, 3e-3);  // positions, column and the sum
}

TEST_F(PlanOf, ShapeComputationThatOnlyWorkersNeedLeavesTheTrainer) {
  load(R"(penstock-ir 1
input %x leaf 0 float32 [s0, 4]
input %w state "w" float32 [4]
%p = aten::hann_window(4) group 0 "window"
%a = aten::mul.Tensor(%x, %p) group 1 "apply"
%y = aten::mul.Tensor(%a, %w) group 2 "scale"
output %y
)");
  const graph::Plan made = plan();
  EXPECT_EQ(labels(made.moved), (std::vector<std::string>{"window", "apply"}));
  EXPECT_EQ(labelled(made.moved, "window").reason, "it depends on constants alone, and the trainer no longer needs it");
}

TEST_F(PlanOf, NumberComputedFromContentsCannotCross) {
  load(R"(penstock-ir 1
input %x leaf 0 float32 [s0, 4]
input %w state "w" float32 [4]
%a = aten::nonzero(%x) group 0 "nonzero"
%n = aten::sym_size.int(%a, 0) group 1 "count"
%y = aten::div.Scalar(%w, %n) group 2 "divide"
output %y
)");
  const graph::Plan made = plan(graph::CutMode::kMaximal);
  EXPECT_EQ(labels(made.moved), (std::vector<std::string>{"nonzero"}));
  EXPECT_NE(labelled(made.kept, "count").reason.find("a number or list would have to be sent"), std::string::npos)
      << labelled(made.kept, "count").reason;
}

TEST_F(PlanOf, ViewsOfOneValueCrossOnce) {
  load(R"(penstock-ir 1
input %x leaf 0 float32 [s0, 4]
input %w state "w" float32 [4]
%a = aten::neg(%x)
%b = aten::view(%a, [-1])
%y = aten::mul.Tensor(%a, %w)
%z = opaque::use(%b)
output %y
output %z
)");
  calibration_.values[id("b")].storage = calibration_.values[id("a")].storage;
  const graph::Plan made = plan(graph::CutMode::kMaximal);
  EXPECT_EQ(made.boundary_names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(made.boundary_bytes, 1000);
}

TEST_F(PlanOf, LeavesOfOneStorageCountOnce) {
  load(R"(penstock-ir 1
input %x leaf 0 float32 [4]
input %z leaf 1 float32 [2, 2]
%y = opaque::use(%x, %z)
output %y
)");
  calibration_.values[id("z")].storage = calibration_.values[id("x")].storage;
  EXPECT_EQ(plan().raw_bytes, 1000);
  EXPECT_EQ(plan().boundary_bytes, 1000);
}

TEST_F(PlanOf, RawLeafThatTheTrainerHasAnywayCostsNothing) {
  load(kNormalise);
  set_bytes("x", 40'000'000);
  set_bytes("f", 10'000'000);
  set_bytes("n", 10'000'000);
  EXPECT_EQ(plan().moved.size(), 2u);  // 10 MB instead of 40
  prices_.raw_stays = true;
  EXPECT_TRUE(plan().moved.empty());  // 10 MB instead of none: 2.5 ms against 1.5
}

TEST_F(PlanOf, PlanOfAnotherGraphIsAMismatch) {
  load(kNormalise);
  calibration_.node_s.pop_back();
  EXPECT_EQ(graph::make_plan(graph_, verdicts_, calibration_, prices_, graph::CutMode::kAuto).error().code,
            Errc::kMismatch);
  load(kNormalise);
  verdicts_.pop_back();
  EXPECT_EQ(graph::make_plan(graph_, verdicts_, calibration_, prices_, graph::CutMode::kAuto).error().code,
            Errc::kMismatch);
}

TEST_F(PlanOf, PricesThatMakeNoSenseAreRefused) {
  load(kNormalise);
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    prices_ = {};
    prices_.worker_count = bad;
    EXPECT_FALSE(graph::make_plan(graph_, verdicts_, calibration_, prices_, graph::CutMode::kAuto)) << bad;
    prices_ = {};
    prices_.link_bytes_per_s = bad;
    EXPECT_FALSE(graph::make_plan(graph_, verdicts_, calibration_, prices_, graph::CutMode::kAuto)) << bad;
  }
  EXPECT_FALSE(graph::cut_mode_from_name("most"));
}

}  // namespace
}  // namespace penstock::capture
