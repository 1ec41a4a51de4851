// SPDX-License-Identifier: Apache-2.0
#pragma once
// The closed sets of names in the IR: dtypes, layouts and memory formats, spelled as torch spells them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace penstock::graph {

enum class Dtype : uint8_t {
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint16,
  kUint32,
  kUint64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kComplex32,
  kComplex64,
  kComplex128,
  kBool,
  kFloat8E5m2,
  kFloat8E4m3fn,
};
inline constexpr std::array<std::string_view, 18> kDtypeNames = {
    "uint8",    "int8",    "int16",   "int32",     "int64",     "uint16",     "uint32", "uint64",      "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "bool",   "float8_e5m2", "float8_e4m3fn"};
inline constexpr std::array<uint8_t, 18> kDtypeBytes = {1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 4, 8, 16, 1, 1, 1};

enum class Layout : uint8_t { kStrided, kSparseCoo, kSparseCsr, kSparseCsc, kSparseBsr, kSparseBsc, kMkldnn, kJagged };
inline constexpr std::array<std::string_view, 8> kLayoutNames = {"strided",    "sparse_coo", "sparse_csr", "sparse_csc",
                                                                 "sparse_bsr", "sparse_bsc", "_mkldnn",    "jagged"};

enum class MemoryFormat : uint8_t { kContiguous, kPreserve, kChannelsLast, kChannelsLast3d };
inline constexpr std::array<std::string_view, 4> kMemoryFormatNames = {"contiguous_format", "preserve_format",
                                                                       "channels_last", "channels_last_3d"};

constexpr std::string_view name_of(Dtype dtype) { return kDtypeNames[static_cast<size_t>(dtype)]; }
constexpr std::string_view name_of(Layout layout) { return kLayoutNames[static_cast<size_t>(layout)]; }
constexpr std::string_view name_of(MemoryFormat format) { return kMemoryFormatNames[static_cast<size_t>(format)]; }
constexpr size_t byte_size(Dtype dtype) { return kDtypeBytes[static_cast<size_t>(dtype)]; }

// Returns the enumerator of that name, as in name_in<Dtype>(kDtypeNames, "int64").
template <typename Enum, size_t count>
constexpr std::optional<Enum> name_in(const std::array<std::string_view, count>& names, std::string_view name) {
  for (size_t i = 0; i < count; ++i)
    if (names[i] == name) return static_cast<Enum>(i);
  return std::nullopt;
}

}  // namespace penstock::graph
