// SPDX-License-Identifier: Apache-2.0
#include "capture/operator_twins.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>

#include "capture/families.h"

namespace penstock::capture {
namespace {

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

std::optional<FunctionalTwin> functional_twin(const c10::OperatorHandle& op) {
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
  return FunctionalTwin{std::move(*found), is_one_of(kViewChanges, name)};
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

}  // namespace penstock::capture
