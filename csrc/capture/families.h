// SPDX-License-Identifier: Apache-2.0
#pragma once
// Facts about ATen's operators that are missing from their schemas. Each table is one fact, with the reason why the
// schema is not trusted; names are without namespace and overload.

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

namespace penstock::capture {

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

}  // namespace penstock::capture
