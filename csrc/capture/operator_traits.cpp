// SPDX-License-Identifier: Apache-2.0
// annotate(): looks each operator up in the dispatcher. Fails closed: an operator is pure only if its schema, its tags,
// the tables of families.h and its arguments rule out everything else.

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>

#include <algorithm>

#include "capture/capture.h"
#include "capture/families.h"
#include "capture/operator_twins.h"
#include "capture/schema.h"
#include "graph/size_ops.h"

namespace penstock::capture {
namespace {

std::string_view base_name(std::string_view op) {
  op.remove_prefix(std::min(op.size(), op.find("::") + 2));
  return op.substr(0, op.find('.'));
}

graph::ValueKind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return graph::ValueKind::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::SymFloatType:
    case c10::TypeKind::SymBoolType:
    case c10::TypeKind::NumberType: return graph::ValueKind::kNumber;
    case c10::TypeKind::ListType: {
      const graph::ValueKind element = kind_of(type->containedType(0));
      if (element == graph::ValueKind::kTensor) return graph::ValueKind::kTensorList;
      if (element == graph::ValueKind::kNumber) return graph::ValueKind::kNumberList;
      return graph::ValueKind::kUnknown;
    }
    default: return graph::ValueKind::kUnknown;
  }
}

bool is_off(const graph::Argument& argument) {
  if (const auto* flag = argument.get<bool>()) return !*flag;
  if (const auto* number = argument.get<int64_t>()) return *number == 0;
  if (const auto* number = argument.get<graph::Real>()) return number->value == 0;
  return false;
}

graph::Traits make_traits(graph::Purity purity, std::string reason = {}) {
  graph::Traits traits;
  traits.purity = purity;
  traits.reason = std::move(reason);
  return traits;
}

class Annotator {
 public:
  explicit Annotator(graph::Graph& graph)
      : graph_(graph), kinds_(graph.value_names.size(), graph::ValueKind::kUnknown) {}

  void run() {
    for (const graph::Input& input : graph_.inputs)
      kinds_[input.value] =
          input.kind == graph::InputKind::kInt ? graph::ValueKind::kNumber : graph::ValueKind::kTensor;
    graph_.traits.clear();
    for (const graph::Node& node : graph_.nodes) {
      graph::Traits traits = traits_of(node);
      traits.result_kinds.resize(node.results.size(), graph::ValueKind::kUnknown);
      for (size_t i = 0; i < node.results.size(); ++i) kinds_[node.results[i]] = traits.result_kinds[i];
      graph_.traits.push_back(std::move(traits));
    }
  }

 private:
  graph::Traits traits_of(const graph::Node& node) const {
    if (const graph::SizeOp* op = graph::find_size_op(node.op)) return size_op_traits(node, *op);
    if (node.op.starts_with("opaque::") || node.op.starts_with("opaque_view::")) return opaque_traits(node);
    auto matched = match_schema(node);
    if (!matched) return make_traits(graph::Purity::kUnknown, matched.error().message);
    return aten_traits(node, matched.value());
  }

  // The front end guarantees for a call that it does not lower: it does not write, and with `opaque::` its results do
  // not share memory either.
  static graph::Traits opaque_traits(const graph::Node& node) {
    graph::Traits traits = make_traits(graph::Purity::kOpaque, "has no known effect");
    if (node.op.starts_with("opaque_view::")) alias_all(node, traits);
    return traits;
  }

  graph::Traits size_op_traits(const graph::Node& node, const graph::SizeOp& op) const {
    graph::Traits traits =
        make_traits(op.kind == graph::SizeOpKind::kMetadata ? graph::Purity::kMetadata : graph::Purity::kPure);
    if (node.args.size() != op.arity || !node.kwargs.empty() || node.results.size() != 1)
      return make_traits(graph::Purity::kUnknown, "does not have the arguments of " + std::string(op.name));
    traits.result_kinds = {op.result};
    if (op.name == "list::get") {
      traits.result_kinds = {element_kind(node.args[0])};
      for_each_value(node.args[0], [&](graph::ValueId list) { traits.aliases.emplace_back(node.results[0], list); });
    }
    return traits;
  }

  graph::ValueKind element_kind(const graph::Argument& list) const {
    if (const auto* ref = list.get<graph::ValueRef>()) {
      if (kinds_[ref->id] == graph::ValueKind::kTensorList) return graph::ValueKind::kTensor;
      if (kinds_[ref->id] == graph::ValueKind::kNumberList) return graph::ValueKind::kNumber;
      return graph::ValueKind::kUnknown;
    }
    bool is_numbers = true;
    for_each_value(list,
                   [&](graph::ValueId item) { is_numbers = is_numbers && kinds_[item] == graph::ValueKind::kNumber; });
    return is_numbers ? graph::ValueKind::kNumber : graph::ValueKind::kUnknown;
  }

  static void alias_all(const graph::Node& node, graph::Traits& traits) {
    for_each_operand(node, [&](graph::ValueId operand) {
      for (const graph::ValueId result : node.results) traits.aliases.emplace_back(result, operand);
    });
  }

  graph::Traits aten_traits(const graph::Node& node, const MatchedCall& call) const {
    graph::Traits traits = make_traits(graph::Purity::kPure);
    const c10::FunctionSchema& schema = call.op.schema();
    for (const c10::Argument& result : schema.returns()) traits.result_kinds.push_back(kind_of(result.type()));
    add_aliases(node, call, traits);
    add_writes(call, traits);
    if (std::string why = never_moves(node, call); !why.empty()) {
      traits.purity = graph::Purity::kState;
      traits.reason = std::move(why);
    } else if (is_metadata(node.op)) {
      traits.purity = graph::Purity::kMetadata;
    } else if (draws(node, call)) {
      traits.purity = graph::Purity::kRandom;
    }
    return traits;
  }

  static bool is_metadata(std::string_view op) {
    return op == "aten::sym_size.int" || op == "aten::size.int" || op == "aten::sym_numel";
  }

  // Every annotated result counts as sharing memory with every annotated operand: finer sets are rarely worthwhile, and
  // lists have wildcards.
  static void add_aliases(const graph::Node& node, const MatchedCall& call, graph::Traits& traits) {
    const c10::FunctionSchema& schema = call.op.schema();
    const bool is_composite = call.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
                              call.op.hasTag(at::Tag::maybe_aliasing_or_mutating);
    const bool is_in_doubt = is_composite && !is_one_of(kFreshComposites, base_name(node.op));
    for (size_t r = 0; r < node.results.size(); ++r) {
      const graph::ValueKind kind = traits.result_kinds[r];
      if (kind != graph::ValueKind::kTensor && kind != graph::ValueKind::kTensorList) continue;
      const bool is_marked = schema.returns()[r].alias_info() != nullptr;
      if (!is_marked && !is_in_doubt) continue;
      for (size_t a = 0; a < call.arguments.size(); ++a) {
        if (call.arguments[a] == nullptr) continue;
        if (!is_in_doubt && schema.arguments()[a].alias_info() == nullptr) continue;
        for_each_value(*call.arguments[a],
                       [&](graph::ValueId operand) { traits.aliases.emplace_back(node.results[r], operand); });
      }
    }
  }

  static void add_writes(const MatchedCall& call, graph::Traits& traits) {
    const auto add = [&](const graph::Argument* argument) {
      if (argument != nullptr) for_each_value(*argument, [&](graph::ValueId value) { traits.writes.push_back(value); });
    };
    for (const WrittenArgument& written : written_arguments(call.op)) {
      const graph::Argument* flag = written.flag ? call.arguments[*written.flag] : nullptr;
      if (flag == nullptr || !is_off(*flag)) add(call.arguments[written.position]);
    }
  }

  // Returns why the call can never be moved; empty if it could be.
  static std::string never_moves(const graph::Node& node, const MatchedCall& call) {
    const c10::FunctionSchema& schema = call.op.schema();
    const std::string_view name = base_name(node.op);
    if (is_one_of(kUninitialised, name)) return "returns uninitialised memory";
    if (is_one_of(kBeyondValues, name)) return "operates on storage, files or streams, not on values";
    if (std::any_of(kNotPlain.begin(), kNotPlain.end(), [&](auto prefix) { return name.starts_with(prefix); }))
      return "creates tensors that are not plain strided tensors";
    if (call.op.hasTag(at::Tag::inplace_view)) return "changes its operand in place";
    if (schema.is_mutable()) return "writes an operand in place";
    if (call.op.hasTag(at::Tag::nondeterministic_bitwise)) return "may return other bits each time";
    if (call.op.hasTag(at::Tag::data_dependent_output)) return "reads tensor contents on the host";
    if (schema.returns().empty()) return "returns no result, so it is called for its side effect";
    for (const c10::Argument& result : schema.returns()) {
      const graph::ValueKind kind = kind_of(result.type());
      const bool is_tensor = kind == graph::ValueKind::kTensor || kind == graph::ValueKind::kTensorList;
      if (!is_tensor && !is_metadata(node.op)) return "returns something other than a tensor";
    }
    for (size_t a = 0; a < call.arguments.size(); ++a) {
      const graph::Argument* argument = call.arguments[a];
      if (argument == nullptr || argument->get<graph::None>() != nullptr) continue;
      const auto* device = argument->get<graph::Device>();
      if (device != nullptr && device->type != "cpu") return "puts its result on " + device->type;
      const auto* layout = argument->get<graph::Layout>();
      if (layout != nullptr && *layout != graph::Layout::kStrided)
        return "creates tensors that are not plain strided tensors";
      if (schema.arguments()[a].name() == "pin_memory" && !is_off(*argument)) return "allocates pinned memory";
      // A device that is only known at run time may be any device.
      if (schema.arguments()[a].name() == "device" && argument->get<graph::ValueRef>() != nullptr)
        return "puts its result on an unknown device";
    }
    return {};
  }

  static bool draws(const graph::Node& node, const MatchedCall& call) {
    const auto& parameters = call.op.schema().arguments();
    const bool takes_generator = std::any_of(parameters.begin(), parameters.end(), [](const c10::Argument& parameter) {
      return parameter.name() == "generator";
    });
    if (!call.op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator) return false;
    for (const DrawSwitch& draw_switch : kDrawSwitches) {
      if (draw_switch.op != base_name(node.op)) continue;
      const graph::Argument* argument = argument_named(call, draw_switch.argument);
      if (argument != nullptr && is_off(*argument)) return false;
      // dropout_p is 0 unless given; no other switch has a default.
      if (argument == nullptr && draw_switch.argument == "dropout_p") return false;
    }
    return true;
  }

  graph::Graph& graph_;
  std::vector<graph::ValueKind> kinds_;  // by value
};

}  // namespace

void annotate(graph::Graph& graph) { Annotator(graph).run(); }

}  // namespace penstock::capture
