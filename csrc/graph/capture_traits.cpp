// SPDX-License-Identifier: Apache-2.0
// annotate(): what the dispatcher knows of each operator. Fails closed: an operator is pure only when its schema, its
// tags, the tables of capture_families.h and its arguments all leave nothing else.

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>

#include "graph/capture.h"
#include "graph/capture_families.h"
#include "graph/capture_schema.h"
#include "graph/size_ops.h"

namespace penstock::graph {
namespace {

std::string_view base_name(std::string_view op) {
  op.remove_prefix(std::min(op.size(), op.find("::") + 2));
  return op.substr(0, op.find('.'));
}

ValueKind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return ValueKind::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::SymFloatType:
    case c10::TypeKind::SymBoolType:
    case c10::TypeKind::NumberType: return ValueKind::kNumber;
    case c10::TypeKind::ListType: {
      const ValueKind element = kind_of(type->containedType(0));
      if (element == ValueKind::kTensor) return ValueKind::kTensorList;
      if (element == ValueKind::kNumber) return ValueKind::kNumberList;
      return ValueKind::kUnknown;
    }
    default: return ValueKind::kUnknown;
  }
}

bool is_off(const Argument& argument) {
  if (const auto* flag = argument.get<bool>()) return !*flag;
  if (const auto* number = argument.get<int64_t>()) return *number == 0;
  if (const auto* number = argument.get<Real>()) return number->value == 0;
  return false;
}

Traits make_traits(Purity purity, std::string reason = {}) {
  Traits traits;
  traits.purity = purity;
  traits.reason = std::move(reason);
  return traits;
}

class Annotator {
 public:
  explicit Annotator(Graph& graph) : graph_(graph), kinds_(graph.value_names.size(), ValueKind::kUnknown) {}

  void run() {
    for (const Input& input : graph_.inputs)
      kinds_[input.value] = input.kind == InputKind::kInt ? ValueKind::kNumber : ValueKind::kTensor;
    graph_.traits.clear();
    for (const Node& node : graph_.nodes) {
      Traits traits = traits_of(node);
      traits.result_kinds.resize(node.results.size(), ValueKind::kUnknown);
      for (size_t i = 0; i < node.results.size(); ++i) kinds_[node.results[i]] = traits.result_kinds[i];
      graph_.traits.push_back(std::move(traits));
    }
  }

 private:
  Traits traits_of(const Node& node) const {
    if (const SizeOp* op = find_size_op(node.op)) return size_op_traits(node, *op);
    if (node.op.starts_with("opaque::") || node.op.starts_with("opaque_view::")) return opaque_traits(node);
    auto matched = match_schema(node);
    if (!matched) return make_traits(Purity::kUnknown, matched.error().message);
    return aten_traits(node, matched.value());
  }

  // The front end's word for a call that it does not lower: nothing is written, and with `opaque::` nothing is shared.
  static Traits opaque_traits(const Node& node) {
    Traits traits = make_traits(Purity::kOpaque, "has no known effect");
    if (node.op.starts_with("opaque_view::")) alias_all(node, traits);
    return traits;
  }

  Traits size_op_traits(const Node& node, const SizeOp& op) const {
    Traits traits = make_traits(op.kind == SizeOpKind::kMetadata ? Purity::kMetadata : Purity::kPure);
    if (node.args.size() != op.arity || !node.kwargs.empty() || node.results.size() != 1)
      return make_traits(Purity::kUnknown, "does not have the arguments of " + std::string(op.name));
    traits.result_kinds = {op.result};
    if (op.name == "list::get") {
      traits.result_kinds = {element_kind(node.args[0])};
      for_each_value(node.args[0], [&](ValueId list) { traits.aliases.emplace_back(node.results[0], list); });
    }
    return traits;
  }

  ValueKind element_kind(const Argument& list) const {
    if (const auto* ref = list.get<ValueRef>()) {
      if (kinds_[ref->id] == ValueKind::kTensorList) return ValueKind::kTensor;
      if (kinds_[ref->id] == ValueKind::kNumberList) return ValueKind::kNumber;
      return ValueKind::kUnknown;
    }
    bool is_numbers = true;
    for_each_value(list, [&](ValueId item) { is_numbers = is_numbers && kinds_[item] == ValueKind::kNumber; });
    return is_numbers ? ValueKind::kNumber : ValueKind::kUnknown;
  }

  static void alias_all(const Node& node, Traits& traits) {
    for_each_operand(node, [&](ValueId operand) {
      for (const ValueId result : node.results) traits.aliases.emplace_back(result, operand);
    });
  }

  Traits aten_traits(const Node& node, const MatchedCall& call) const {
    Traits traits = make_traits(Purity::kPure);
    const c10::FunctionSchema& schema = call.op.schema();
    for (const c10::Argument& result : schema.returns()) traits.result_kinds.push_back(kind_of(result.type()));
    add_aliases(node, call, traits);
    add_writes(node, call, traits);
    if (std::string why = never_moves(node, call); !why.empty()) {
      traits.purity = Purity::kState;
      traits.reason = std::move(why);
    } else if (is_metadata(node.op)) {
      traits.purity = Purity::kMetadata;
    } else if (draws(node, call)) {
      traits.purity = Purity::kRandom;
    }
    return traits;
  }

  static bool is_metadata(std::string_view op) {
    return op == "aten::sym_size.int" || op == "aten::size.int" || op == "aten::sym_numel";
  }

  // Every annotated result counts as sharing memory with every annotated operand: finer sets are rarely worth anything,
  // and lists have wildcards.
  static void add_aliases(const Node& node, const MatchedCall& call, Traits& traits) {
    const c10::FunctionSchema& schema = call.op.schema();
    const bool is_composite = call.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
                              call.op.hasTag(at::Tag::maybe_aliasing_or_mutating);
    const bool is_in_doubt = is_composite && !is_one_of(kFreshComposites, base_name(node.op));
    for (size_t r = 0; r < node.results.size(); ++r) {
      const ValueKind kind = traits.result_kinds[r];
      if (kind != ValueKind::kTensor && kind != ValueKind::kTensorList) continue;
      const bool is_marked = schema.returns()[r].alias_info() != nullptr;
      if (!is_marked && !is_in_doubt) continue;
      for (size_t a = 0; a < call.arguments.size(); ++a) {
        if (call.arguments[a] == nullptr) continue;
        if (!is_in_doubt && schema.arguments()[a].alias_info() == nullptr) continue;
        for_each_value(*call.arguments[a],
                       [&](ValueId operand) { traits.aliases.emplace_back(node.results[r], operand); });
      }
    }
  }

  static void add_writes(const Node& node, const MatchedCall& call, Traits& traits) {
    const auto add = [&](const Argument* argument) {
      if (argument != nullptr) for_each_value(*argument, [&](ValueId value) { traits.writes.push_back(value); });
    };
    const auto& parameters = call.op.schema().arguments();
    for (size_t a = 0; a < parameters.size(); ++a)
      if (parameters[a].alias_info() != nullptr && parameters[a].alias_info()->isWrite()) add(call.arguments[a]);
    for (const RunningStatistics& statistics : kRunningStatistics) {
      if (statistics.op != base_name(node.op)) continue;
      const Argument* flag = argument_named(call, statistics.flag);
      if (flag != nullptr && is_off(*flag)) continue;
      add(argument_named(call, "running_mean"));
      add(argument_named(call, "running_var"));
    }
  }

  // Why the call can never run anywhere but in its place, or nothing.
  static std::string never_moves(const Node& node, const MatchedCall& call) {
    const c10::FunctionSchema& schema = call.op.schema();
    const std::string_view name = base_name(node.op);
    if (is_one_of(kUninitialised, name)) return "gives memory whose contents are whatever was there";
    if (is_one_of(kBeyondValues, name)) return "works on storage, files or streams, not on values";
    if (std::any_of(kNotPlain.begin(), kNotPlain.end(), [&](auto prefix) { return name.starts_with(prefix); }))
      return "makes tensors that are not plain strided ones";
    if (call.op.hasTag(at::Tag::inplace_view)) return "changes its operand in place";
    if (schema.is_mutable()) return "writes an operand in place";
    if (call.op.hasTag(at::Tag::nondeterministic_bitwise)) return "may give other bits each time";
    if (call.op.hasTag(at::Tag::data_dependent_output)) return "reads contents of a tensor on the host";
    if (schema.returns().empty()) return "gives no result, so it is called for what it does";
    for (const c10::Argument& result : schema.returns()) {
      const ValueKind kind = kind_of(result.type());
      const bool is_tensor = kind == ValueKind::kTensor || kind == ValueKind::kTensorList;
      if (!is_tensor && !is_metadata(node.op)) return "gives the program something other than a tensor";
    }
    for (size_t a = 0; a < call.arguments.size(); ++a) {
      const Argument* argument = call.arguments[a];
      if (argument == nullptr || argument->get<None>() != nullptr) continue;
      const auto* device = argument->get<Device>();
      if (device != nullptr && device->type != "cpu") return "puts its result on " + device->type;
      const auto* layout = argument->get<Layout>();
      if (layout != nullptr && *layout != Layout::kStrided) return "makes tensors that are not plain strided ones";
      if (schema.arguments()[a].name() == "pin_memory" && !is_off(*argument)) return "makes pinned memory";
      // A device that is only known at run time may be any.
      if (schema.arguments()[a].name() == "device" && argument->get<ValueRef>() != nullptr)
        return "puts its result on a device that is not known";
    }
    return {};
  }

  static bool draws(const Node& node, const MatchedCall& call) {
    const auto& parameters = call.op.schema().arguments();
    const bool takes_generator = std::any_of(parameters.begin(), parameters.end(), [](const c10::Argument& parameter) {
      return parameter.name() == "generator";
    });
    if (!call.op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator) return false;
    for (const DrawSwitch& draw_switch : kDrawSwitches) {
      if (draw_switch.op != base_name(node.op)) continue;
      const Argument* argument = argument_named(call, draw_switch.argument);
      if (argument != nullptr && is_off(*argument)) return false;
      // dropout_p is 0 unless given; no other switch has a default.
      if (argument == nullptr && draw_switch.argument == "dropout_p") return false;
    }
    return true;
  }

  Graph& graph_;
  std::vector<ValueKind> kinds_;  // by value
};

}  // namespace

void annotate(Graph& graph) { Annotator(graph).run(); }

}  // namespace penstock::graph
