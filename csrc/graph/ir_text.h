// SPDX-License-Identifier: Apache-2.0
#pragma once
// The text form of a graph. Workers receive it from the network, so the parser accepts any bytes: a text that is not a
// graph gives an error with its line and column, and every length has a cap. The grammar, one statement per line, with
// any number of blanks and empty lines:
//
//   penstock-ir 1
//   input %x0 leaf 0 uint8 [s0, 3, 256, 256]
//   input %c0 const "L['self'].mean" float32 [1, 3, 1, 1] digest "5feceb66ffc86f38d952786c6d696c79"   (digest optional)
//   input %p0 state "L['self'].conv.weight" float32 [64, 3, 7, 7]
//   input %s0 int "size of %x0" = %x0.size(0)                      (without '=': a number from outside the batch)
//   %v1 = aten::to.dtype(%x0, dtype:float32, false, copy=false) group 0 "x.float() at model.py:12"  (group optional)
//   %v2, %v3 = aten::max.dim(%v1, 1) at "model.py:13"                                (at optional, after group)
//   %v4 = aten::alias(%v2) on cuda:0 [cpu float32] group 1 "x.to(device)"            (on optional, before group)
//   %v5 = aten::mul.Scalar(%v4, 2) on cuda:0 [float32]      (a dtype for each operand, or int; cpu if it is there)
//   output %v2 key "9fa2..."                                                                         (key optional)
//
// Inputs come first, then nodes, then outputs. Leaves name symbols freely; constants and state have plain sizes.
// Arguments: integers, floats (1.5, 1e-05, inf, -inf, nan), true, false, none, "text", dtype:float32, layout:strided,
// memory_format:channels_last, device:cuda:0, %values and [lists] of them; name=argument after the positional ones.
// In quoted text \" \\ \n \r \t \xHH are the escapes.

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::graph {

inline constexpr size_t kTextBytesMax = size_t{8} << 20;
inline constexpr size_t kNodesMax = 100'000;
inline constexpr size_t kInputsMax = 65'536;
inline constexpr size_t kValuesMax = 400'000;
inline constexpr size_t kNameBytesMax = 160;
inline constexpr size_t kQuotedBytesMax = 4'096;
inline constexpr size_t kListItemsMax = 65'536;
inline constexpr size_t kListDepthMax = 4;
inline constexpr size_t kArgumentsMax = 256;
inline constexpr size_t kDimsMax = 64;

Result<Graph> parse_graph(std::string_view text);

// Returns the text of a graph: pure ASCII, and the same for equal graphs, on which keys and tests rely.
// parse_graph(print_graph(g)) equals g except for traits, if g's names and texts are within the caps.
std::string print_graph(const Graph& graph);

// Appends one argument as in the text of a graph; `print_value` prints the values in it.
void print_argument(std::string& text, const Argument& argument,
                    const std::function<void(std::string&, ValueId)>& print_value);

// Returns the statement of one node, for messages.
std::string print_node(const Graph& graph, const Node& node);

// "aten::div.Tensor at model.py:12 (clamp, div at model.py:13)": the operator, its line, and its group's label. The
// line is omitted if the label ends with it.
std::string describe(const Node& node);

}  // namespace penstock::graph
