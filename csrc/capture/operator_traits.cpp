// SPDX-License-Identifier: Apache-2.0
#include "capture/operator_traits.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include "capture/capture.h"
#include "capture/schema.h"
#include "graph/size_ops.h"

namespace penstock::capture {
namespace {

// Facts about ATen's operators that are missing from their schemas. Each table is one fact, with the reason why the
// schema is not trusted; names are without namespace and overload.

// Results have the previous contents of the memory.
inline constexpr std::array<std::string_view, 9> kUninitialised = {"empty",
                                                                   "empty_like",
                                                                   "empty_strided",
                                                                   "empty_permuted",
                                                                   "empty_quantized",
                                                                   "new_empty",
                                                                   "_empty_affine_quantized",
                                                                   "_empty_per_channel_affine_quantized",
                                                                   "new_empty_strided"};

// Operate on storages, streams, files or pinned memory instead of values.
inline constexpr std::array<std::string_view, 12> kBeyondValues = {
    "resize",     "resize_",   "resize_as",     "resize_as_", "resize_as_sparse", "set",
    "set_source", "from_file", "record_stream", "pin_memory", "_pin_memory",      "_resize_output"};

// Results are not plain strided tensors. Each entry is a prefix of a name.
inline constexpr std::array<std::string_view, 10> kNotPlain = {"sparse_",   "_sparse_",   "to_sparse", "_to_sparse",
                                                               "to_mkldnn", "_to_mkldnn", "_nested_",  "nested_",
                                                               "quantize_", "_make_per_"};

// Writes that change their operand's view of its data, not the data.
inline constexpr std::array<std::string_view, 4> kViewChanges = {"transpose_", "t_", "unsqueeze_", "squeeze_"};

// Update running statistics that their schemas do not mark, if the argument named `flag` is true.
struct RunningStatistics {
  std::string_view op;
  std::string_view flag;
};
inline constexpr std::array<RunningStatistics, 6> kRunningStatistics = {{{"batch_norm", "training"},
                                                                         {"native_batch_norm", "training"},
                                                                         {"_batch_norm_impl_index", "training"},
                                                                         {"cudnn_batch_norm", "training"},
                                                                         {"miopen_batch_norm", "training"},
                                                                         {"instance_norm", "use_input_stats"}}};

// Tagged as seeded, but do not draw if this argument has this value: `train` false, `dropout_p` zero.
struct DrawSwitch {
  std::string_view op;
  std::string_view argument;
};
inline constexpr std::array<DrawSwitch, 16> kDrawSwitches = {
    {{"dropout", "train"},
     {"alpha_dropout", "train"},
     {"feature_dropout", "train"},
     {"feature_alpha_dropout", "train"},
     {"native_dropout", "train"},
     {"rrelu", "training"},
     {"scaled_dot_product_attention", "dropout_p"},
     {"_scaled_dot_product_flash_attention_for_cpu", "dropout_p"},
     {"_scaled_dot_product_attention_math", "dropout_p"},
     {"lstm", "train"},
     {"gru", "train"},
     {"rnn_tanh", "train"},
     {"rnn_relu", "train"},
     {"lstm", "dropout"},
     {"gru", "dropout"},
     {"rnn_tanh", "dropout"}}};

// Composite operators may return an operand although their schemas do not mark it (dropout in eval mode does, type_as
// does), so their results count as views. The operators in this table do not: they always compute into new memory.
inline constexpr std::array<std::string_view, 43> kFreshComposites = {"conv1d",
                                                                      "conv2d",
                                                                      "conv3d",
                                                                      "conv_transpose1d",
                                                                      "conv_transpose2d",
                                                                      "conv_transpose3d",
                                                                      "linear",
                                                                      "matmul",
                                                                      "layer_norm",
                                                                      "group_norm",
                                                                      "instance_norm",
                                                                      "batch_norm",
                                                                      "max_pool1d",
                                                                      "max_pool2d",
                                                                      "max_pool3d",
                                                                      "adaptive_avg_pool1d",
                                                                      "adaptive_avg_pool2d",
                                                                      "adaptive_avg_pool3d",
                                                                      "cross_entropy_loss",
                                                                      "nll_loss",
                                                                      "nll_loss_nd",
                                                                      "binary_cross_entropy_with_logits",
                                                                      "cosine_similarity",
                                                                      "pairwise_distance",
                                                                      "cdist",
                                                                      "relu6",
                                                                      "selu",
                                                                      "log_softmax",
                                                                      "softmax",
                                                                      "rms_norm",
                                                                      "where",
                                                                      "one_hot",
                                                                      "vstack",
                                                                      "hstack",
                                                                      "dstack",
                                                                      "column_stack",
                                                                      "upsample_bilinear2d",
                                                                      "upsample_nearest2d",
                                                                      "upsample_bicubic2d",
                                                                      "_upsample_bilinear2d_aa",
                                                                      "_upsample_bicubic2d_aa",
                                                                      "scaled_dot_product_attention",
                                                                      "outer"};

template <size_t count>
constexpr bool is_one_of(const std::array<std::string_view, count>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

using Arguments = std::vector<c10::Argument>;

std::string_view name_in_aten(const c10::FunctionSchema& schema) {
  std::string_view name = schema.name();
  return name.starts_with("aten::") ? name.substr(6) : std::string_view();
}

std::string full_name(const c10::FunctionSchema& schema) {
  return schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
}

// Returns the first overload of `name`, in torch's order, whose arguments fit.
template <typename Fits>
std::optional<std::string> find_overload(const std::string& name, const Fits& fits) {
  for (const auto& op : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name)))
    if (fits(op->schema())) return full_name(op->schema());
  return std::nullopt;
}

bool have_same_names(const Arguments& a, const Arguments& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& one, const auto& other) { return one.name() == other.name(); });
}

bool are_of_one_type(const c10::Argument& a, const c10::Argument& b) { return *a.type() == *b.type(); }

}  // namespace

std::vector<WrittenArgument> written_arguments(const c10::OperatorHandle& op) {
  std::vector<WrittenArgument> written;
  const c10::FunctionSchema& schema = op.schema();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) written.push_back({i});
  }
  for (const RunningStatistics& statistics : kRunningStatistics) {
    if (statistics.op != name_in_aten(schema)) continue;
    const std::optional<int> flag = schema.argumentIndexWithName(statistics.flag);
    for (const char* name : {"running_mean", "running_var"}) {
      const std::optional<int> position = schema.argumentIndexWithName(name);
      if (!position) continue;
      written.push_back({static_cast<size_t>(*position), flag ? std::optional<size_t>(*flag) : std::nullopt});
    }
  }
  return written;
}

std::optional<FunctionalVariant> functional_twin(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string_view name = name_in_aten(schema);
  if (!name.ends_with('_') || op.hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  const Arguments& wanted = schema.arguments();
  // The overload usually has the same name; an exception is `pow_.Scalar`, whose twin is `pow.Tensor_Scalar`.
  const auto fits = [&](const c10::FunctionSchema& other) {
    const Arguments& arguments = other.arguments();
    return !other.is_mutable() && have_same_names(arguments, wanted) &&
           std::equal(arguments.begin(), arguments.end(), wanted.begin(), are_of_one_type);
  };
  std::optional<std::string> found = find_overload(schema.name().substr(0, schema.name().size() - 1), fits);
  if (!found) return std::nullopt;
  return FunctionalVariant{std::move(*found), is_one_of(kViewChanges, name)};
}

std::optional<std::string> overload_with_numbers(const c10::OperatorHandle& op, const std::set<size_t>& positions) {
  const Arguments& wanted = op.schema().arguments();
  bool is_other = false;
  const auto takes_number = [&](size_t i) {
    return positions.contains(i) && wanted[i].type()->kind() == c10::TypeKind::TensorType;
  };
  for (size_t i = 0; i < wanted.size(); ++i) is_other = is_other || takes_number(i);
  if (!is_other) return std::nullopt;
  return find_overload(op.schema().name(), [&](const c10::FunctionSchema& other) {
    const Arguments& arguments = other.arguments();
    if (!have_same_names(arguments, wanted)) return false;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const bool fits = takes_number(i) ? arguments[i].type()->kind() == c10::TypeKind::NumberType
                                        : are_of_one_type(arguments[i], wanted[i]);
      if (!fits) return false;
    }
    return true;
  });
}

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

// Looks each operator up in the dispatcher. Fails closed: an operator is pure only if its schema, its tags, the tables
// of missing facts and its arguments rule out everything else.
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
    const bool is_uncertain = is_composite && !is_one_of(kFreshComposites, base_name(node.op));
    for (size_t r = 0; r < node.results.size(); ++r) {
      const graph::ValueKind kind = traits.result_kinds[r];
      if (kind != graph::ValueKind::kTensor && kind != graph::ValueKind::kTensorList) continue;
      const bool is_marked = schema.returns()[r].alias_info() != nullptr;
      if (!is_marked && !is_uncertain) continue;
      for (size_t a = 0; a < call.arguments.size(); ++a) {
        if (call.arguments[a] == nullptr) continue;
        if (!is_uncertain && schema.arguments()[a].alias_info() == nullptr) continue;
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
