// SPDX-License-Identifier: Apache-2.0
#include "runtime/write_over.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/TypeProperties.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace penstock::runtime {
namespace {

// Elementwise; in place, they give the same bits for float32 and float64.
constexpr std::array<std::string_view, 33> kElementwise = {"aten::abs",
                                                           "aten::add.Scalar",
                                                           "aten::add.Tensor",
                                                           "aten::ceil",
                                                           "aten::clamp",
                                                           "aten::clamp_max",
                                                           "aten::clamp_min",
                                                           "aten::cos",
                                                           "aten::div.Scalar",
                                                           "aten::div.Tensor",
                                                           "aten::exp",
                                                           "aten::expm1",
                                                           "aten::floor",
                                                           "aten::leaky_relu",
                                                           "aten::log",
                                                           "aten::log10",
                                                           "aten::log1p",
                                                           "aten::log2",
                                                           "aten::mul.Scalar",
                                                           "aten::mul.Tensor",
                                                           "aten::neg",
                                                           "aten::pow.Tensor_Scalar",
                                                           "aten::reciprocal",
                                                           "aten::relu",
                                                           "aten::round",
                                                           "aten::rsqrt",
                                                           "aten::sigmoid",
                                                           "aten::sin",
                                                           "aten::sqrt",
                                                           "aten::sub.Scalar",
                                                           "aten::sub.Tensor",
                                                           "aten::tanh",
                                                           "aten::masked_fill.Scalar"};

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == c10::Layout::Strided && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor() && !tensor.is_nested();
}

}  // namespace

std::optional<c10::OperatorHandle> find_write_over(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  if (std::find(kElementwise.begin(), kElementwise.end(), full_name(name)) == kElementwise.end()) return std::nullopt;
  const std::string overload = name.overload_name == "Tensor_Scalar" ? "Scalar" : name.overload_name;
  auto found = c10::Dispatcher::singleton().findSchema({name.name + "_", overload});
  if (!found) return std::nullopt;
  const auto& ours = op.schema().arguments();
  const auto& theirs = found->schema().arguments();
  const bool is_same = std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), [](auto& a, auto& b) {
    return a.name() == b.name() && *a.real_type() == *b.real_type();
  });
  return is_same ? found : std::nullopt;
}

bool can_write_over(std::span<const c10::IValue> arguments) {
  const at::Tensor& target = arguments[0].toTensor();
  // For half precision, some in-place variants differ: `mul_` rounds its factor first.
  const bool is_computed_alike = target.scalar_type() == at::kFloat || target.scalar_type() == at::kDouble;
  if (!is_computed_alike || !is_plain(target) || !target.is_contiguous() ||
      static_cast<int64_t>(target.nbytes()) < kWriteOverBytesMin)
    return false;
  // The stride of a dimension of size 1 has no meaning, and a result's may differ from the operand's.
  if (std::find(target.sizes().begin(), target.sizes().end(), 1) != target.sizes().end()) return false;
  size_t place_count = 1;  // among the arguments
  for (const c10::IValue& argument : arguments.subspan(1)) {
    if (!argument.isTensor()) {
      if (argument.isComplexDouble()) return false;
      continue;
    }
    const at::Tensor& other = argument.toTensor();
    if (other.is_same(target)) {
      ++place_count;
      continue;
    }
    if (!is_plain(other) || !at::is_expandable_to(other.sizes(), target.sizes())) return false;
    // A mask is not an operand of the arithmetic, but is no wider than the tensor that it masks.
    if (at::result_type(target, other) != target.scalar_type()) return false;
  }
  // Part of a larger storage is refused: the result would keep all of it alive.
  return target.use_count() == place_count + 1 && target.storage().use_count() == 1 &&
         target.storage().nbytes() == target.nbytes();
}

}  // namespace penstock::runtime
