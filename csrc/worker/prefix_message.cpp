// SPDX-License-Identifier: Apache-2.0
#include "worker/prefix_message.h"

#include <ATen/ops/empty_strided.h>

#include <cstring>
#include <utility>

#include "wire/prefix_body.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

namespace {

wire::PrefixSettings to_wire(const runtime::KernelSettings& settings) {
  return {.flushes_denormals = settings.flushes_denormals,
          .is_deterministic = settings.is_deterministic,
          .uses_mkldnn = settings.uses_mkldnn,
          .matmul_precision = static_cast<uint8_t>(settings.matmul_precision),
          .convolution_precision = static_cast<uint8_t>(settings.convolution_precision),
          .default_dtype = static_cast<wire::DTypeCode>(settings.default_dtype.toScalarType())};
}

runtime::KernelSettings from_wire(const wire::PrefixSettings& settings) {
  return {.thread_count = 1,
          .flushes_denormals = settings.flushes_denormals,
          .is_deterministic = settings.is_deterministic,
          .uses_mkldnn = settings.uses_mkldnn,
          .matmul_precision = static_cast<at::Float32Precision>(settings.matmul_precision),
          .convolution_precision = static_cast<at::Float32Precision>(settings.convolution_precision),
          .default_dtype = c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(settings.default_dtype))};
}

}  // namespace

Result<std::vector<std::byte>> write_prefix_message(const PrefixMessage& message) {
  wire::PrefixBody body{.text = message.text,
                        .seed = message.seed,
                        .library = message.library,
                        .library_leaves = {},
                        .constants = {},
                        .numerics = message.numerics,
                        .settings = to_wire(message.settings)};
  for (const runtime::LeafLayout& leaf : message.library_leaves) {
    body.library_leaves.push_back({.leaf_index = leaf.leaf_index,
                                   .dtype = static_cast<wire::DTypeCode>(leaf.dtype),
                                   .sizes = leaf.sizes,
                                   .strides = leaf.strides});
  }
  for (const at::Tensor& constant : message.constants) {
    if (!is_plain_tensor(constant)) {
      return Fault{Errc::kMismatch,
                   "a constant of a prefix is not a plain CPU tensor; only plain CPU tensors can be sent to workers"};
    }
    wire::TensorEntry entry = describe_tensor(constant);
    const std::span bytes(static_cast<const std::byte*>(constant.const_data_ptr()), entry.bytes);
    body.constants.push_back({.entry = std::move(entry), .bytes = bytes});
  }
  return wire::write_prefix_body(body);
}

Result<PrefixMessage> read_prefix_message(std::span<const std::byte> message) {
  auto body = wire::parse_prefix_body(message);
  if (!body) return body.error();
  PrefixMessage prefix{.text = std::string(body.value().text),
                       .constants = {},
                       .seed = body.value().seed,
                       .library = std::string(body.value().library),
                       .library_leaves = {},
                       .numerics = body.value().numerics,
                       .settings = from_wire(body.value().settings)};
  for (wire::PrefixLeaf& leaf : body.value().library_leaves) {
    prefix.library_leaves.push_back({.leaf_index = leaf.leaf_index,
                                     .dtype = static_cast<at::ScalarType>(leaf.dtype),
                                     .sizes = std::move(leaf.sizes),
                                     .strides = std::move(leaf.strides)});
  }
  for (const auto& [entry, bytes] : body.value().constants) {
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(entry.dtype));
    at::Tensor constant = at::empty_strided(entry.shape, entry.strides, options);
    if (constant.storage().nbytes() != entry.bytes) {
      return Fault{Errc::kMalformed, "a constant of a prefix has " + std::to_string(entry.bytes) +
                                         " bytes, but torch gives its shape " +
                                         std::to_string(constant.storage().nbytes()) +
                                         "; trainer and workers must run the same version of penstock"};
    }
    if (!bytes.empty()) std::memcpy(constant.mutable_data_ptr(), bytes.data(), bytes.size());
    prefix.constants.push_back(std::move(constant));
  }
  return prefix;
}

}  // namespace penstock::worker
