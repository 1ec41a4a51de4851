// SPDX-License-Identifier: Apache-2.0
#include "runtime/kernel_families.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "graph/size_ops.h"

namespace penstock::runtime {
namespace {

using graph::Argument;
using graph::Node;
using graph::ValueId;

// Names of ATen's operators without namespace and overload. The fingerprint of a family represents all operators of the
// family; numeric_fingerprint.cpp has the samples.

// Operators that move, copy, create or compare elements, or round once according to IEEE 754.
constexpr auto kArithmetic = std::to_array<std::string_view>({
    // copies, casts and views
    "to",
    "_to_copy",
    "type_as",
    "clone",
    "contiguous",
    "alias",
    "detach",
    "view",
    "view_as",
    "reshape",
    "reshape_as",
    "_reshape_alias",
    "_unsafe_view",
    "expand",
    "expand_as",
    "permute",
    "transpose",
    "t",
    "numpy_T",
    "mT",
    "movedim",
    "moveaxis",
    "swapaxes",
    "swapdims",
    "unsqueeze",
    "squeeze",
    "flatten",
    "unflatten",
    "ravel",
    "narrow",
    "narrow_copy",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "chunk",
    "tensor_split",
    "hsplit",
    "vsplit",
    "unbind",
    "unfold",
    "as_strided",
    "diagonal",
    "cat",
    "concat",
    "concatenate",
    "stack",
    "hstack",
    "vstack",
    "dstack",
    "column_stack",
    "flip",
    "fliplr",
    "flipud",
    "roll",
    "rot90",
    "repeat",
    "repeat_interleave",
    "tile",
    "pad",
    "constant_pad_nd",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "index",
    "index_select",
    "gather",
    "take",
    "take_along_dim",
    "masked_select",
    "masked_fill",
    "where",
    "select_scatter",
    "slice_scatter",
    "tril",
    "triu",
    "diag",
    "diag_embed",
    "embedding",
    "one_hot",
    "channel_shuffle",
    "pixel_shuffle",
    "pixel_unshuffle",
    "im2col",
    "meshgrid",
    "broadcast_tensors",
    "broadcast_to",
    "lift",
    "lift_fresh",
    "lift_fresh_copy",
    "nonzero",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    // fresh tensors
    "zeros",
    "ones",
    "full",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "eye",
    "scalar_tensor",
    // comparisons
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "not_equal",
    "isnan",
    "isinf",
    "isfinite",
    "isposinf",
    "isneginf",
    "logical_and",
    "logical_or",
    "logical_xor",
    "logical_not",
    "maximum",
    "minimum",
    "max",
    "min",
    "amax",
    "amin",
    "aminmax",
    "argmax",
    "argmin",
    "fmax",
    "fmin",
    "clamp",
    "clamp_min",
    "clamp_max",
    "clip",
    "sort",
    "argsort",
    "msort",
    "topk",
    "kthvalue",
    "searchsorted",
    "bucketize",
    "isin",
    "any",
    "all",
    "signbit",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "relu",
    "relu6",
    "hardtanh",
    "threshold",
    // one rounding, or none
    "add",
    "sub",
    "subtract",
    "rsub",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "floor_divide",
    "neg",
    "negative",
    "positive",
    "abs",
    "absolute",
    "sign",
    "sgn",
    "floor",
    "ceil",
    "trunc",
    "fix",
    "frac",
    "reciprocal",
    "square",
    "fmod",
    "remainder",
    "copysign",
    "nan_to_num",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_not",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "__and__",
    "__or__",
    "__xor__",
    "__lshift__",
    "__rshift__",
    "gcd",
    "lcm",
});
constexpr auto kComplex =
    std::to_array<std::string_view>({"complex", "polar", "view_as_complex", "view_as_real", "real", "imag", "conj",
                                     "_conj", "conj_physical", "resolve_conj", "resolve_neg", "angle"});
constexpr auto kFused = std::to_array<std::string_view>(
    {"addcmul", "addcdiv", "lerp", "arange", "linspace", "hardsigmoid", "hardswish", "leaky_relu", "round"});
constexpr auto kExponential = std::to_array<std::string_view>(
    {"exp",       "exp2",       "expm1",       "log",           "log2",          "log10",         "log1p",
     "sigmoid",   "logit",      "log_sigmoid", "softplus",      "silu",          "elu",           "celu",
     "selu",      "mish",       "gelu",        "erf",           "erfc",          "erfinv",        "lgamma",
     "logaddexp", "logaddexp2", "xlogy",       "special_expit", "special_log1p", "special_expm1", "special_xlogy"});
constexpr auto kTrigonometric = std::to_array<std::string_view>(
    {"sin",     "cos",  "tan",  "asin", "acos",  "atan",  "atan2", "arcsin",  "arccos",  "arctan",
     "arctan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "deg2rad", "rad2deg", "sinc"});
constexpr auto kRoots = std::to_array<std::string_view>({"sqrt", "rsqrt", "pow", "float_power", "hypot"});
constexpr auto kSums = std::to_array<std::string_view>({"sum",
                                                        "nansum",
                                                        "mean",
                                                        "nanmean",
                                                        "std",
                                                        "var",
                                                        "std_mean",
                                                        "var_mean",
                                                        "prod",
                                                        "cumsum",
                                                        "cumprod",
                                                        "norm",
                                                        "linalg_vector_norm",
                                                        "logsumexp",
                                                        "avg_pool1d",
                                                        "avg_pool2d",
                                                        "avg_pool3d",
                                                        "adaptive_avg_pool1d",
                                                        "adaptive_avg_pool2d",
                                                        "_adaptive_avg_pool2d",
                                                        "bincount",
                                                        "diff",
                                                        "count_nonzero"});
constexpr auto kNormalising = std::to_array<std::string_view>(
    {"softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "native_layer_norm", "batch_norm",
     "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "group_norm",
     "native_group_norm", "instance_norm", "rms_norm"});
constexpr auto kMatrices = std::to_array<std::string_view>(
    {"mm", "bmm", "matmul", "linear", "addmm", "addbmm", "baddbmm", "addmv", "addr", "mv", "dot", "vdot", "inner",
     "outer", "einsum", "tensordot", "chain_matmul", "linalg_multi_dot", "bilinear"});
constexpr auto kConvolutions =
    std::to_array<std::string_view>({"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
                                     "conv_transpose3d", "convolution", "_convolution"});
constexpr auto kFourier =
    std::to_array<std::string_view>({"fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft",
                                     "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn",
                                     "fft_rfftn", "fft_irfftn", "_fft_r2c", "_fft_c2c", "_fft_c2r", "stft", "istft"});
constexpr auto kInterpolation =
    std::to_array<std::string_view>({"upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
                                     "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
                                     "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "affine_grid_generator"});

template <size_t count>
bool is_one_of(const std::array<std::string_view, count>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

bool is_one(const Argument& argument) {
  if (const auto* number = argument.get<int64_t>()) return *number == 1;
  if (const auto* number = argument.get<graph::Real>()) return number->value == 1;
  return false;
}

// `a + alpha * b` is rounded once or twice, unless alpha is 1.
bool has_factor(const Node& node, std::string_view name) {
  if (name != "add" && name != "sub" && name != "subtract" && name != "rsub") return false;
  if (node.args.size() > 2 && !is_one(node.args[2])) return true;
  return std::ranges::any_of(
      node.kwargs, [](const graph::Keyword& keyword) { return keyword.name == "alpha" && !is_one(keyword.value); });
}

NumericFamily family_by_name(const Node& node) {
  constexpr std::string_view kNamespace = "aten::";
  if (graph::find_size_op(node.op) != nullptr) return NumericFamily::kArithmetic;
  std::string_view name = node.op;
  if (!name.starts_with(kNamespace)) return NumericFamily::kOther;
  name.remove_prefix(kNamespace.size());
  name = name.substr(0, name.find('.'));
  if (name == "size" || name.starts_with("sym_")) return NumericFamily::kArithmetic;
  if (has_factor(node, name)) return NumericFamily::kFused;
  if (is_one_of(kArithmetic, name)) return NumericFamily::kArithmetic;
  if (is_one_of(kComplex, name)) return NumericFamily::kComplex;
  if (is_one_of(kFused, name)) return NumericFamily::kFused;
  if (is_one_of(kExponential, name)) return NumericFamily::kExponential;
  if (is_one_of(kTrigonometric, name)) return NumericFamily::kTrigonometric;
  if (is_one_of(kRoots, name)) return NumericFamily::kRoots;
  if (is_one_of(kSums, name)) return NumericFamily::kSums;
  if (is_one_of(kNormalising, name)) return NumericFamily::kNormalising;
  if (is_one_of(kMatrices, name)) return NumericFamily::kMatrices;
  if (is_one_of(kConvolutions, name)) return NumericFamily::kConvolutions;
  if (is_one_of(kFourier, name)) return NumericFamily::kFourier;
  if (is_one_of(kInterpolation, name)) return NumericFamily::kInterpolation;
  return NumericFamily::kOther;
}

bool is_complex(graph::Dtype dtype) { return graph::name_of(dtype).starts_with("complex"); }

bool names_complex(const Argument& argument) {
  if (const auto* dtype = argument.get<graph::Dtype>()) return is_complex(*dtype);
  return false;
}

}  // namespace

std::vector<NumericFamily> kernel_families(const graph::Graph& graph) {
  std::vector<bool> may_be_complex(graph.value_names.size());
  for (const graph::Input& input : graph.inputs)
    may_be_complex[input.value] = input.kind != graph::InputKind::kInt && is_complex(input.dtype);
  std::vector<NumericFamily> families;
  families.reserve(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    NumericFamily family = family_by_name(node);
    bool reads_complex = false;
    graph::for_each_operand(node, [&](ValueId value) { reads_complex = reads_complex || may_be_complex[value]; });
    const bool makes_complex =
        reads_complex || family == NumericFamily::kComplex || family == NumericFamily::kFourier ||
        std::ranges::any_of(node.args, names_complex) ||
        std::ranges::any_of(node.kwargs, [](const graph::Keyword& each) { return names_complex(each.value); });
    if (reads_complex && family == NumericFamily::kArithmetic) family = NumericFamily::kComplex;
    if (reads_complex && family != NumericFamily::kComplex && family != NumericFamily::kFourier)
      family = NumericFamily::kOther;  // the samples of the other families are real numbers
    if (i < graph.traits.size() && graph.traits[i].purity == graph::Purity::kRandom) family = NumericFamily::kRandom;
    for (const ValueId result : node.results) may_be_complex[result] = makes_complex;
    families.push_back(family);
  }
  return families;
}

}  // namespace penstock::runtime
