// SPDX-License-Identifier: Apache-2.0
#include "capture/ranks.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "capture/schema.h"

namespace penstock::capture {
namespace {

enum class Rule : uint8_t { kSame, kOneMore, kOneLess, kOfList };

struct RankRule {
  std::string_view op;  // of aten, without overload
  Rule rule;
};

// Operators that are not pointwise, with a rule for the rank of their first operand. `kOfList`: the second operand is a
// list with one size per dimension.
constexpr std::array<RankRule, 48> kRules = {{
    {"to", Rule::kSame},
    {"contiguous", Rule::kSame},
    {"clone", Rule::kSame},
    {"detach", Rule::kSame},
    {"type_as", Rule::kSame},
    {"zeros_like", Rule::kSame},
    {"ones_like", Rule::kSame},
    {"full_like", Rule::kSame},
    {"permute", Rule::kSame},
    {"transpose", Rule::kSame},
    {"flip", Rule::kSame},
    {"roll", Rule::kSame},
    {"slice", Rule::kSame},
    {"narrow", Rule::kSame},
    {"pad", Rule::kSame},
    {"constant_pad_nd", Rule::kSame},
    {"reflection_pad1d", Rule::kSame},
    {"reflection_pad2d", Rule::kSame},
    {"replication_pad2d", Rule::kSame},
    {"cumsum", Rule::kSame},
    {"softmax", Rule::kSame},
    {"log_softmax", Rule::kSame},
    {"layer_norm", Rule::kSame},
    {"batch_norm", Rule::kSame},
    {"instance_norm", Rule::kSame},
    {"group_norm", Rule::kSame},
    {"linear", Rule::kSame},
    {"conv1d", Rule::kSame},
    {"conv2d", Rule::kSame},
    {"conv3d", Rule::kSame},
    {"avg_pool2d", Rule::kSame},
    {"max_pool2d", Rule::kSame},
    {"adaptive_avg_pool2d", Rule::kSame},
    {"upsample_nearest1d", Rule::kSame},
    {"upsample_nearest2d", Rule::kSame},
    {"upsample_nearest3d", Rule::kSame},
    {"_upsample_nearest_exact1d", Rule::kSame},
    {"_upsample_nearest_exact2d", Rule::kSame},
    {"upsample_linear1d", Rule::kSame},
    {"upsample_bilinear2d", Rule::kSame},
    {"upsample_bicubic2d", Rule::kSame},
    {"_upsample_bilinear2d_aa", Rule::kSame},
    {"_upsample_bicubic2d_aa", Rule::kSame},
    {"unsqueeze", Rule::kOneMore},
    {"select", Rule::kOneLess},
    {"view", Rule::kOfList},
    {"reshape", Rule::kOfList},
    {"expand", Rule::kOfList},
}};

constexpr std::string_view kAten = "aten::";

std::string_view without_overload(std::string_view op) {
  op.remove_prefix(kAten.size());
  return op.substr(0, op.find('.'));
}

// Whether the operator returns a number, which broadcasts with anything.
bool is_number(std::string_view op) {
  return (op.starts_with("size::") && op != "size::sizes") || op == "aten::sym_size.int" || op == "aten::item";
}

}  // namespace

std::optional<size_t> Ranks::find(graph::ValueId value) const {
  const auto found = ranks_.find(value);
  return found == ranks_.end() ? std::nullopt : std::optional(found->second);
}

void Ranks::note_call(const graph::Node& call) {
  if (is_number(call.op)) return set(call.results.front(), 0);
  if (call.op.starts_with("torchscript::")) return ranks_.clear();  // it writes the tensors that it reads
  if (!call.op.starts_with(kAten)) return;
  const auto op = find_operator(call.op);
  if (!op) return;
  const bool is_pointwise = op->hasTag(at::Tag::pointwise);
  if (op->hasTag(at::Tag::inplace_view) || (op->schema().is_mutable() && !is_pointwise)) return ranks_.clear();
  if (call.results.size() != 1 || call.args.empty()) return;
  std::optional<size_t> rank;
  if (is_pointwise) {
    rank = broadcast_rank(call);
  } else {
    const auto found = std::find_if(kRules.begin(), kRules.end(),
                                    [&](const RankRule& rule) { return rule.op == without_overload(call.op); });
    const std::optional<size_t> of_first = rank_of(call.args.front());
    if (found == kRules.end() || !of_first) return;
    switch (found->rule) {
      case Rule::kSame: rank = of_first; break;
      case Rule::kOneMore: rank = *of_first + 1; break;
      case Rule::kOneLess:
        if (*of_first > 0) rank = *of_first - 1;
        break;
      case Rule::kOfList:
        if (call.args.size() > 1)
          if (const auto* sizes = call.args[1].get<graph::Argument::List>()) rank = sizes->size();
        break;
    }
  }
  if (rank) set(call.results.front(), *rank);
}

std::optional<size_t> Ranks::rank_of(const graph::Argument& argument) const {
  const auto* value = argument.get<graph::ValueRef>();
  return value == nullptr ? std::nullopt : find(value->id);
}

std::optional<size_t> Ranks::broadcast_rank(const graph::Node& call) const {
  size_t most = 0;
  const auto take = [&](const graph::Argument& argument) {
    if (argument.get<graph::Argument::List>() != nullptr) return false;
    if (argument.get<graph::ValueRef>() == nullptr) return true;  // a number, a dtype
    const std::optional<size_t> rank = rank_of(argument);
    most = std::max(most, rank.value_or(0));
    return rank.has_value();
  };
  for (const graph::Argument& argument : call.args)
    if (!take(argument)) return std::nullopt;
  for (const auto& named : call.kwargs)
    if (!take(named.value)) return std::nullopt;
  return most;
}

}  // namespace penstock::capture
