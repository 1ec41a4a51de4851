// SPDX-License-Identifier: Apache-2.0
#pragma once
// For which operators a CPU gives the bits that a device gives. Casts, single IEEE operations, integers and gathers are
// the same on both; exponentials, sums and products of matrices are not. Which is which was measured, operator by
// operator, dtype by dtype and form of arguments by form, and is a table for each type of device. It fails closed: what
// is in no table stays on the device.
//
// The text of a table, one statement a line; tests/device/measure_bits.py writes it on a device:
//
//   penstock-device-bits 1
//   device cuda
//   measured "NVIDIA H200, torch 2.11.0"
//   equal add.Tensor(T,T) float32 float64        with each of these dtypes as T
//   equal where.self(bool,T,T) float32
//   differs exp(T) float32                       was measured, and is not equal
//   reciprocal div.Scalar(T,i) float32 uint8     is equal once it is written as a product with 1 / i, as the device
//   does
//
// A form has an operator without "aten::" and its arguments: the dtype of each tensor, i, f, true, false, none, str for
// a text, [..] for a list (of one element if all are alike, with ... behind it), name=.. for what is given by name.

#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::graph {

// The texts of the tables that penstock comes with.
std::span<const std::string_view> device_bits_tables();

// Adds a table to those of its device. kMalformed with the line. Thread-safe.
Result<void> add_device_bits(std::string_view table);

// Has nodes on a device that a CPU would round otherwise be computed as the device computes them, where a table says
// how.
void put_equal_twins(Graph& graph);

// The form of a node on a device, as a table has it.
std::string bits_form(const Node& node);

// Why a CPU cannot stand for the device of a node, as a clause that follows the operator's name; empty where it can.
std::string why_other_bits(const Node& node);

// Whether an operator on floating-point numbers gives others altogether where its operands hardly change: it rounds.
bool jumps(const Node& node);

}  // namespace penstock::graph
