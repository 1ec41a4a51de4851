// SPDX-License-Identifier: Apache-2.0
#pragma once
// A MatchedCall is a node's operator, found in torch's dispatcher, with the node's arguments arranged by the operator's
// schema. The conversions between the IR's names and torch's dtypes, layouts, memory formats and devices are defined
// here, too.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::capture {

// Prefix for the name of an operator of another library that the user has declared free of side effects, with results
// that do not share memory with other tensors.
inline constexpr std::string_view kDeclared = "declared::";

// A node's operator, and the node's arguments for it.
struct MatchedCall {
  c10::OperatorHandle op;
  std::vector<const graph::Argument*> arguments;  // by argument of the schema; null if its default is used
};

// "aten::sub.Tensor"; none if the dispatcher has no such operator.
std::optional<c10::OperatorHandle> find_operator(std::string_view name);

// Returns kUnsupported if the operator is neither aten's nor declared, or does not exist; kMalformed if its schema has
// no room for an argument, lacks one, or has another number of results. Types are not checked. The result points into
// `node`.
Result<MatchedCall> match_schema(const graph::Node& node);

// Returns the argument of that name, or null if the schema has none or its default is used.
const graph::Argument* argument_named(const MatchedCall& call, std::string_view name);

// The IR's closed sets of names as torch's enumerations, in the same order.
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

// Returns the IR's name of a device.
graph::Device device_from_torch(const c10::Device& device);

// Returns torch's device of that name; none for the CPU, for the meta device, and for devices that torch does not have
// in this process.
std::optional<c10::Device> accelerator_of(const graph::Device& name);

// Returns a TorchScript type without the Optional around it.
inline c10::TypePtr without_optional(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType ? type->containedType(0) : type;
}

}  // namespace penstock::capture
