// SPDX-License-Identifier: Apache-2.0
#pragma once
// Determines for which operators a CPU gives the same bits as a device. Casts, single IEEE operations, integers and
// gathers are the same on both; exponentials, sums and matrix products are not. The differences were measured by
// operator, dtype and form of arguments, and there is a table for each type of device. Fails closed: an operator that
// is in no table stays on the device.
//
// The text of a table, one statement per line; tests/device/measure_bits.py writes it on a device:
//
//   penstock-device-bits 1
//   device cuda
//   measured "NVIDIA H200, torch 2.11.0"
//   equal add.Tensor(T,T) float32 float64        with each of these dtypes as T
//   equal where.self(bool,T,T) float32
//   differs exp(T) float32                       was measured, and is not equal
//   reciprocal div.Scalar(T,i) float32 uint8     is equal if written as a product with 1 / i, as on the device
//
// A form has an operator without "aten::" and its arguments: the dtype of each tensor, i, f, true, false, none, str for
// a text, [..] for a list (one element followed by ... if all are alike), name=.. for a keyword argument.

#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::graph {

// The texts of the tables that are part of penstock.
std::span<const std::string_view> device_bits_tables();

// Adds a table to the tables of its device. Returns kMalformed with the line. Thread-safe.
Result<void> add_device_bits(std::string_view table);

// Rewrites device nodes whose results a CPU would round differently so that a CPU gives the device's bits, where a
// table has a way to.
void put_equal_twins(Graph& graph);

// Returns the form of a node on a device, as written in a table.
std::string bits_form(const Node& node);

// Returns why a CPU cannot replace the device of a node, as a clause that follows the operator's name; empty if it can.
std::string bit_difference_reason(const Node& node);

// Whether an operator on floating-point numbers may give very different results for slightly different operands,
// because it rounds.
bool jumps(const Node& node);

}  // namespace penstock::graph
