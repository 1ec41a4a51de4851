// SPDX-License-Identifier: Apache-2.0
#include "graph/effects.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "base/result.h"
#include "graph/device_bits.h"
#include "graph/ir_text.h"

namespace penstock::graph {
namespace {

// Determines which nodes make a second view of memory that the user has. `known_outside` are values that nodes make but
// that the user can access, as if they were inputs. Nodes of one call of the user's program move together, and the
// values between them are not visible elsewhere.
class SecondViews {
 public:
  SecondViews(const Graph& graph, const AliasSets& aliases, std::span<const ValueId> known_outside)
      : graph_(graph), aliases_(aliases), known_outside_(known_outside), calls_(graph.nodes.size()) {}

  // Returns the result by node.
  std::vector<bool> find() {
    std::vector<bool> found(graph_.nodes.size(), false);
    find_shared_sets();
    if (shared_sets_.empty()) return found;
    follow_calls();
    for (size_t i = 0; i < graph_.nodes.size(); ++i)
      found[i] = std::ranges::any_of(graph_.nodes[i].results, [&](ValueId value) {
        const CallAndSet made{calls_[i], aliases_.find(value)};
        return !exempt_.contains(calls_[i]) && hands_on_.contains(made) &&
               (reads_.contains(made) || hands_on_.at(made).size() > 1);
      });
    return found;
  }

 private:
  using Call = size_t;  // its first node
  using CallAndSet = std::pair<Call, ValueId>;

  // Finds the alias sets of outputs of which the user has another value too.
  void find_shared_sets() {
    std::map<ValueId, std::set<ValueId>> had;
    for (const Input& input : graph_.inputs) had[aliases_.find(input.value)].insert(input.value);
    for (const ValueId value : known_outside_) had[aliases_.find(value)].insert(value);
    for (const Output& output : graph_.outputs) had[aliases_.find(output.value)].insert(output.value);
    for (const Output& output : graph_.outputs)
      if (const ValueId set = aliases_.find(output.value); had[set].size() > 1) shared_sets_.insert(set);
  }

  void follow_calls() {
    std::map<ValueId, Call> makers;
    std::map<uint32_t, Call> first_of_group;
    const auto hand_on = [&](ValueId value) {
      const ValueId set = aliases_.find(value);
      const auto maker = makers.find(value);
      if (maker != makers.end() && shared_sets_.contains(set)) hands_on_[{maker->second, set}].insert(value);
    };
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      calls_[i] = node.group ? first_of_group.try_emplace(*node.group, i).first->second : i;
      for_each_operand(node, [&](ValueId operand) {
        const auto maker = makers.find(operand);
        if (maker != makers.end() && maker->second == calls_[i]) return;
        hand_on(operand);
        reads_.insert({calls_[i], aliases_.find(operand)});
      });
      for (const ValueId result : node.results) makers[result] = calls_[i];
    }
    for (const Output& output : graph_.outputs) hand_on(output.value);
    for (const ValueId value : known_outside_)
      if (const auto maker = makers.find(value); maker != makers.end()) exempt_.insert(maker->second);
  }

  const Graph& graph_;
  const AliasSets& aliases_;
  const std::span<const ValueId> known_outside_;
  std::set<ValueId> shared_sets_;
  std::vector<Call> calls_;  // by node
  std::set<CallAndSet> reads_;
  std::map<CallAndSet, std::set<ValueId>> hands_on_;
  std::set<Call> exempt_;  // they make values that are known outside
};

std::vector<bool> second_views(const Graph& graph, const AliasSets& aliases, std::span<const ValueId> known_outside) {
  return SecondViews(graph, aliases, known_outside).find();
}

// Why a value is RANDOM or STATE, as a clause; passed along the dataflow so that every reason names the first cause.
using Cause = std::string;

struct Fact {
  Level level = Level::kConst;
  Cause cause;
  bool is_input = false;    // the cause is an input's name, not yet a clause
  bool is_inexact = false;  // a worker may give other last bits
};

class EffectAnalysis {
 public:
  EffectAnalysis(const Graph& graph, const EffectOptions& options)
      : graph_(graph),
        options_(options),
        facts_(graph.value_names.size()),
        from_leaf_(graph.value_names.size(), false),
        aliases_(graph.value_names.size()),
        origins_(graph.value_names.size()),
        pins_(graph.value_names.size()),
        spoils_(graph.value_names.size()),
        is_second_view_(graph.nodes.size(), false) {}

  std::vector<Verdict> run() {
    for (const Input& input : graph_.inputs) set_input(input);
    for (size_t i = 0; i < graph_.nodes.size(); ++i) collect_aliases(traits_of(i));
    for (size_t i = 0; i < graph_.nodes.size(); ++i) collect_origins(graph_.nodes[i], traits_of(i));
    for (size_t i = 0; i < graph_.nodes.size(); ++i)
      for (const ValueId written : traits_of(i).writes) pin(written, describe(graph_.nodes[i]) + " writes it in place");
    if (options_.is_whole_program) is_second_view_ = second_views(graph_, seen_aliases(), options_.known_outside);
    for (int round = 0;; ++round) {
      std::vector<Verdict> verdicts = judge_all();
      if (!pin_split_sets(/*all=*/round == kRoundsMax)) return verdicts;
    }
  }

 private:
  // Pins found while judging require another round; after this many rounds, every set in doubt is pinned at once.
  static constexpr int kRoundsMax = 3;

  struct Spoil {
    Cause cause;          // the first unknown operator that may have written the set
    ValueId operand = 0;  // by this value
    bool is_split = false;
  };

  const Traits& traits_of(size_t node) const {
    return node < graph_.traits.size() ? graph_.traits[node] : unknown_traits_;
  }

  void set_input(const Input& input) {
    Fact& fact = facts_[input.value];
    switch (input.kind) {
      case InputKind::kLeaf:
        fact.level = Level::kStateless;
        from_leaf_[input.value] = true;
        break;
      case InputKind::kConst: break;
      case InputKind::kState: fact = {Level::kState, input.source + ", a parameter or state of the model", true}; break;
      case InputKind::kInt:
        if (input.size_of)
          fact.level = Level::kShape;
        else
          fact = {Level::kState, input.source + ", a number from outside the batch", true};
        break;
    }
  }

  void collect_aliases(const Traits& traits) {
    for (const auto& [result, operand] : traits.aliases) aliases_.unite(result, operand);
  }

  // Returns the aliases except for pairs that did not share memory when the program was run.
  AliasSets seen_aliases() const {
    AliasSets seen(graph_.value_names.size());
    for (size_t i = 0; i < graph_.nodes.size(); ++i)
      for (const auto& [result, operand] : traits_of(i).aliases)
        if (!are_known_distinct(result, operand)) seen.unite(result, operand);
    return seen;
  }

  bool are_known_distinct(ValueId a, ValueId b) const {
    const auto& memory = options_.memory;
    return !memory.empty() && memory[a] && memory[b] && memory[a] != memory[b];
  }

  // A result of an unknown operator may be any of its operands. This does not mean that the operands share memory with
  // each other, so origins are listed separately and the sets are not united.
  void collect_origins(const Node& node, const Traits& traits) {
    if (traits.purity != Purity::kUnknown) return;
    for (const ValueId result : node.results)
      for_each_operand(node, [&](ValueId operand) { origins_[aliases_.find(result)].push_back(operand); });
  }

  // A write to a set may affect the sets from which it may originate.
  void pin(ValueId value, const Cause& cause) {
    std::vector<ValueId> pending{value};
    while (!pending.empty()) {
      const ValueId set = aliases_.find(pending.back());
      pending.pop_back();
      if (!pins_[set].empty()) continue;
      pins_[set] = cause;
      pending.insert(pending.end(), origins_[set].begin(), origins_[set].end());
    }
  }

  void spoil(ValueId value, const Cause& cause) {
    std::vector<ValueId> pending{value};
    while (!pending.empty()) {
      const ValueId operand = pending.back();
      const ValueId set = aliases_.find(operand);
      pending.pop_back();
      note_read(operand);
      if (!spoils_[set].cause.empty()) continue;
      spoils_[set] = {cause, operand, false};
      pending.insert(pending.end(), origins_[set].begin(), origins_[set].end());
    }
  }

  std::vector<Verdict> judge_all() {
    std::fill(spoils_.begin(), spoils_.end(), Spoil{});
    std::vector<Verdict> verdicts;
    verdicts.reserve(graph_.nodes.size());
    for (size_t i = 0; i < graph_.nodes.size(); ++i) verdicts.push_back(judge(i));
    for (const Output& output : graph_.outputs) note_read(output.value);
    return verdicts;
  }

  // Notes the read of a value that an unknown operator may have written through another alias: if both aliases were
  // sent they would be two tensors, and one of them would miss the write. So the whole set stays.
  void note_read(ValueId value) {
    Spoil& spoil = spoils_[aliases_.find(value)];
    if (!spoil.cause.empty() && spoil.operand != value && is_movable(facts_[value].level)) spoil.is_split = true;
  }

  bool pin_split_sets(bool all) {
    bool pinned = false;
    for (size_t set = 0; set < spoils_.size(); ++set) {
      const Spoil& spoil = spoils_[set];
      if (spoil.cause.empty() || !pins_[set].empty() || !(spoil.is_split || all)) continue;
      pin(static_cast<ValueId>(set), spoil.cause);
      pinned = true;
    }
    return pinned;
  }

  Verdict judge(size_t index) {
    const Node& node = graph_.nodes[index];
    const Traits& traits = traits_of(index);
    Fact fact = own_fact(node, traits);
    bool is_inherited = false;
    bool reads_inexact = false;
    for_each_operand(node, [&](ValueId operand) {
      note_read(operand);
      if (traits.purity != Purity::kMetadata && facts_[operand].is_inexact) reads_inexact = true;
      const std::optional<Fact> change = change_of_memory(operand);
      const Fact read = change ? *change : fact_of_read(operand, traits);
      if (read.level <= fact.level) return;
      fact = {read.level, read.is_input ? describe(node) + " reads " + read.cause : read.cause};
      is_inherited = !change && !read.is_input;
    });
    for (const ValueId result : node.results) {
      const Cause& pin = pins_[aliases_.find(result)];
      if (pin.empty() || fact.level == Level::kState) continue;
      fact = {Level::kState, "%" + graph_.value_names[result] + " is memory that changes: " + pin};
      is_inherited = false;
    }
    const std::string other_bits = node.on && fact.level < Level::kState ? bit_difference_reason(node) : std::string();
    if (fact.level < Level::kState && (!other_bits.empty() || reads_inexact)) {
      if (const std::string clause = exactness_reason(node, other_bits, fact.level); !clause.empty()) {
        fact = {Level::kState, describe(node) + " " + clause};
        is_inherited = false;
      } else {
        fact.is_inexact = true;
      }
    }
    for (const ValueId result : node.results) facts_[result] = fact;
    if (traits.purity == Purity::kUnknown)
      for_each_operand(node, [&](ValueId operand) {
        spoil(operand, describe(node) + ", whose effect is not known, may have written it");
      });
    Verdict verdict{.level = fact.level, .movable = is_movable(fact.level), .reason = reason(fact, is_inherited)};
    verdict.is_inexact = fact.is_inexact;
    verdict.has_other_bits = fact.is_inexact && !other_bits.empty();
    if (verdict.has_other_bits)
      verdict.reason = describe(node) + " " + other_bits + ", and cut_tolerance allows moving it";
    if (verdict.movable && is_second_view_[index]) {
      verdict.is_second_view = true;
      verdict.reason = describe(node) + " returns a second view of memory that leaves forward";
    }
    return verdict;
  }

  // Returns why a node with other bits, or one that reads inexact values, stays, as a clause; empty if it may be
  // inexact.
  std::string exactness_reason(const Node& node, const std::string& other_bits, Level level) const {
    const auto& allowed = options_.may_be_inexact;
    const bool is_allowed =
        !allowed.empty() && level != Level::kRandom && !jumps(node) && !node.results.empty() &&
        std::all_of(node.results.begin(), node.results.end(), [&](ValueId result) { return allowed[result]; });
    if (is_allowed) return {};
    return other_bits.empty() ? "may turn a difference in last bits into a different result" : other_bits;
  }

  bool is_movable(Level level) const {
    return level <= Level::kStateless || (level == Level::kRandom && options_.allow_random);
  }

  Fact own_fact(const Node& node, const Traits& traits) const {
    if (!traits.writes.empty()) return {Level::kState, describe(node) + " writes its operand in place"};
    switch (traits.purity) {
      case Purity::kPure:
      case Purity::kMetadata: return {};
      case Purity::kRandom: return {Level::kRandom, describe(node) + " draws random numbers"};
      case Purity::kUnknown:
      case Purity::kOpaque:
      case Purity::kState: break;
    }
    return {Level::kState, describe(node) + " " + traits.reason};
  }

  // Returns why the memory of `operand` has changed since it was made; none if it has not.
  std::optional<Fact> change_of_memory(ValueId operand) const {
    const ValueId set = aliases_.find(operand);
    const std::string name = "%" + graph_.value_names[operand];
    if (!pins_[set].empty()) return Fact{Level::kState, name + " is memory that changes: " + pins_[set]};
    if (!spoils_[set].cause.empty()) return Fact{Level::kState, name + " is read after " + spoils_[set].cause};
    return std::nullopt;
  }

  // Returns the level of reading `operand`. Sizes of a leaf are known without its contents.
  Fact fact_of_read(ValueId operand, const Traits& traits) const {
    if (traits.purity == Purity::kMetadata && from_leaf_[operand]) return {Level::kShape, {}};
    return facts_[operand];
  }

  std::string reason(const Fact& fact, bool is_inherited) const {
    switch (fact.level) {
      case Level::kConst: return "it depends on constants alone";
      case Level::kShape: return "it depends on sizes and constants alone";
      case Level::kStateless: return "it depends on the batch and constants alone";
      case Level::kRandom:
        if (options_.allow_random) return fact.cause + ", which allow_random permits to move";
        [[fallthrough]];
      case Level::kState: break;
    }
    return is_inherited ? "it depends on a value that stays: " + fact.cause : fact.cause;
  }

  const Graph& graph_;
  const EffectOptions options_;
  std::vector<Fact> facts_;      // by value
  std::vector<bool> from_leaf_;  // by value: it is a leaf itself
  AliasSets aliases_;
  std::vector<std::vector<ValueId>> origins_;  // by alias set: values that it may be, through an unknown operator
  std::vector<Cause> pins_;                    // by alias set: the operator that writes it
  std::vector<Spoil> spoils_;                  // by alias set
  std::vector<bool> is_second_view_;           // by node
  const Traits unknown_traits_;
};

}  // namespace

std::string_view name_of(Level level) {
  switch (level) {
    case Level::kConst: return "CONST";
    case Level::kShape: return "SHAPE";
    case Level::kStateless: return "STATELESS";
    case Level::kRandom: return "RANDOM";
    case Level::kState: return "STATE";
  }
  return "unknown";
}

std::vector<Verdict> analyse_effects(const Graph& graph, const EffectOptions& options) {
  PENSTOCK_ASSERT(options.memory.empty() || options.memory.size() == graph.value_names.size());
  PENSTOCK_ASSERT(options.may_be_inexact.empty() || options.may_be_inexact.size() == graph.value_names.size());
  return EffectAnalysis(graph, options).run();
}

}  // namespace penstock::graph
