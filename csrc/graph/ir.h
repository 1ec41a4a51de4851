// SPDX-License-Identifier: Apache-2.0
#pragma once
// A Graph is the neutral form of a program that both front ends produce: straight-line SSA over ATen operators, with
// symbolic sizes as scalar values. The closed sets of names are defined first, then the traits of an operator call,
// then arguments, inputs, nodes and the graph. Value types only; this file does not depend on torch. The text form is
// in ir_text.h, the meaning of its words in README.md.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace penstock::graph {

// The closed sets of names in the IR are dtypes, layouts and memory formats, spelled as torch spells them.
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

using ValueId = uint32_t;

enum class Purity : uint8_t {
  kUnknown,   // may do anything, also to its operands
  kOpaque,    // not known, but the front end guarantees that it does not write its operands
  kPure,      // its results depend only on its operands
  kMetadata,  // the same, and of tensors it only reads sizes and dtype
  kRandom,    // draws from a generator
  kState,     // known, and must not be moved; `reason` explains why
};

enum class ValueKind : uint8_t {
  kUnknown,
  kTensor,
  kTensorList,
  kNumber,  // int, float, bool
  kNumberList,
};

// The facts about one call of an operator, in terms that do not need torch: filled by annotate() from the dispatcher's
// schema and tags, read by the effect analysis. A default-constructed Traits means that its effect is unknown.
struct Traits {
  Purity purity = Purity::kUnknown;
  std::string reason =
      "its effect was not analysed";                 // kUnknown and kState: the clause that follows the operator's name
  std::vector<ValueId> writes;                       // operands that it changes in place
  std::vector<std::pair<ValueId, ValueId>> aliases;  // (result, operand) that may share memory
  std::vector<ValueKind> result_kinds;               // by result

  friend bool operator==(const Traits&, const Traits&) = default;
};

struct None {
  friend bool operator==(const None&, const None&) = default;
};

// A float literal. Two literals are equal if their bits are, so that a graph with a nan in it still equals its copy,
// and 0.0 and -0.0, which divide differently, are two literals. Every nan is the same quiet nan.
struct Real {
  double value = 0;

  Real() = default;
  explicit Real(double number) : value(number == number ? number : std::numeric_limits<double>::quiet_NaN()) {}

  friend bool operator==(const Real& a, const Real& b) {
    return std::bit_cast<uint64_t>(a.value) == std::bit_cast<uint64_t>(b.value);
  }
};

struct Device {
  std::string type;  // "cpu", "cuda", ...
  std::optional<uint32_t> index;

  friend bool operator==(const Device&, const Device&) = default;
};

// As in torch: "cpu", "cuda:0".
inline std::string name_of(const Device& device) {
  return device.index ? device.type + ":" + std::to_string(*device.index) : device.type;
}

struct ValueRef {
  ValueId id = 0;

  friend bool operator==(const ValueRef&, const ValueRef&) = default;
};

// An argument of a node: a literal, a value, or a list of arguments (`aten::cat([%a, %b], 1)`).
struct Argument {
  using List = std::vector<Argument>;
  std::variant<None, bool, int64_t, Real, std::string, Dtype, Layout, MemoryFormat, Device, ValueRef, List> data;

  friend bool operator==(const Argument&, const Argument&) = default;

  template <typename T>
  const T* get() const {
    return std::get_if<T>(&data);
  }
};

// An operand of a node whose results are on a device.
struct OperandForm {
  std::optional<Dtype> dtype{};  // none for a number
  bool is_on_host = false;

  friend bool operator==(const OperandForm&, const OperandForm&) = default;
};

// The device of a node's results, if not the CPU, and the form of its operands there. Both determine the bits of its
// results.
struct OnDevice {
  Device device;
  std::vector<OperandForm> operands{};  // in the order of for_each_operand()

  friend bool operator==(const OnDevice&, const OnDevice&) = default;
};

struct Keyword {
  std::string name;
  Argument value;

  friend bool operator==(const Keyword&, const Keyword&) = default;
};

// A known size (an integer) or the name of a symbol.
using Dim = std::variant<int64_t, std::string>;

enum class InputKind : uint8_t {
  kLeaf,   // a tensor of the batch
  kConst,  // a tensor that stays the same; sent to the workers once
  kState,  // a tensor that training changes; never leaves the trainer
  kInt,    // an integer of the captured program, usually a size of a leaf
};

struct SizeOf {
  ValueId tensor = 0;
  uint32_t dim = 0;

  friend bool operator==(const SizeOf&, const SizeOf&) = default;
};

struct Input {
  ValueId value = 0;
  InputKind kind = InputKind::kLeaf;
  uint32_t leaf_index = 0;        // kLeaf: which tensor of the flattened batch
  std::string source;             // the others: its name in the program
  Dtype dtype = Dtype::kFloat32;  // all but kInt
  std::vector<Dim> sizes;         // all but kInt
  std::string digest;             // kConst: hash of the content, 32 hex digits, or empty
  std::optional<SizeOf> size_of;  // kInt: the leaf's size it is; none: a number from outside the batch

  friend bool operator==(const Input&, const Input&) = default;
};

struct Node {
  std::vector<ValueId> results;
  std::string op;  // "aten::sub.Tensor"
  std::vector<Argument> args;
  std::vector<Keyword> kwargs;
  std::optional<uint32_t> group;  // nodes of one group are one call of the user's program and move together
  std::string label;              // of the group, for messages
  std::string place;              // the program's line that calls it, "model.py:12", for messages
  std::optional<OnDevice> on{};   // none in a prefix: workers compute on the CPU

  friend bool operator==(const Node&, const Node&) = default;
};

struct Output {
  ValueId value = 0;
  std::string key;  // 32 hex digits in a prefix, else empty

  friend bool operator==(const Output&, const Output&) = default;
};

// Invariant (checked by the parser): a value is made by exactly one input or node, before its first use.
struct Graph {
  std::vector<std::string> value_names;  // by ValueId, without the '%'
  std::vector<Input> inputs;
  std::vector<Node> nodes;
  std::vector<Output> outputs;
  std::vector<Traits> traits;  // by node; empty until annotate() filled it. Not part of the text.

  friend bool operator==(const Graph&, const Graph&) = default;

  // Adds a value of that name and returns its id.
  ValueId add_value(std::string name) {
    value_names.push_back(std::move(name));
    return static_cast<ValueId>(value_names.size() - 1);
  }
};

// Calls visit(ValueId) for each value in the argument, in order, inside lists too.
template <typename Visit>
void for_each_value(const Argument& argument, const Visit& visit) {
  if (const auto* ref = argument.get<ValueRef>()) {
    visit(ref->id);
  } else if (const auto* list = argument.get<Argument::List>()) {
    for (const Argument& item : *list) for_each_value(item, visit);
  }
}

// Calls visit(ValueId) for each value that the node is called with, in order.
template <typename Visit>
void for_each_operand(const Node& node, const Visit& visit) {
  for (const Argument& argument : node.args) for_each_value(argument, visit);
  for (const Keyword& keyword : node.kwargs) for_each_value(keyword.value, visit);
}

}  // namespace penstock::graph
