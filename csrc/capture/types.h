// SPDX-License-Identifier: Apache-2.0
#pragma once
// The IR's closed sets of names as torch's enumerations, and back.

#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <optional>

#include "graph/ir_names.h"

namespace penstock::capture {

inline constexpr std::array<c10::ScalarType, graph::kDtypeNames.size()> kTorchDtypes = {
    c10::ScalarType::Byte,        c10::ScalarType::Char,         c10::ScalarType::Short,
    c10::ScalarType::Int,         c10::ScalarType::Long,         c10::ScalarType::UInt16,
    c10::ScalarType::UInt32,      c10::ScalarType::UInt64,       c10::ScalarType::Half,
    c10::ScalarType::BFloat16,    c10::ScalarType::Float,        c10::ScalarType::Double,
    c10::ScalarType::ComplexHalf, c10::ScalarType::ComplexFloat, c10::ScalarType::ComplexDouble,
    c10::ScalarType::Bool,        c10::ScalarType::Float8_e5m2,  c10::ScalarType::Float8_e4m3fn};

inline constexpr std::array<c10::Layout, graph::kLayoutNames.size()> kTorchLayouts = {
    c10::Layout::Strided,   c10::Layout::Sparse,    c10::Layout::SparseCsr, c10::Layout::SparseCsc,
    c10::Layout::SparseBsr, c10::Layout::SparseBsc, c10::Layout::Mkldnn,    c10::Layout::Jagged};

inline constexpr std::array<c10::MemoryFormat, graph::kMemoryFormatNames.size()> kTorchMemoryFormats = {
    c10::MemoryFormat::Contiguous, c10::MemoryFormat::Preserve, c10::MemoryFormat::ChannelsLast,
    c10::MemoryFormat::ChannelsLast3d};

constexpr c10::ScalarType to_torch(graph::Dtype dtype) { return kTorchDtypes[static_cast<size_t>(dtype)]; }
constexpr c10::Layout to_torch(graph::Layout layout) { return kTorchLayouts[static_cast<size_t>(layout)]; }
constexpr c10::MemoryFormat to_torch(graph::MemoryFormat format) {
  return kTorchMemoryFormats[static_cast<size_t>(format)];
}

// None for dtypes that have no name in the IR, such as quantized ones.
template <typename Enum, typename TorchEnum, size_t count>
constexpr std::optional<Enum> from_torch(const std::array<TorchEnum, count>& all, TorchEnum wanted) {
  for (size_t i = 0; i < count; ++i)
    if (all[i] == wanted) return static_cast<Enum>(i);
  return std::nullopt;
}

inline std::optional<graph::Dtype> dtype_from_torch(c10::ScalarType type) {
  return from_torch<graph::Dtype>(kTorchDtypes, type);
}

}  // namespace penstock::capture
