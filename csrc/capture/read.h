// SPDX-License-Identifier: Apache-2.0
#pragma once
// The result of reading a TorchScript program: its graph, and the written-out program.

#include <optional>
#include <span>

#include "capture/attributes.h"
#include "capture/capture.h"
#include "capture/program.h"
#include "capture/written.h"

namespace penstock::capture {

struct ReadProgram {
  Captured captured;
  WrittenProgram written;
  ReadAttributes attributes;
};

// As ScriptProgram::read. `self` is null for a function.
Result<ReadProgram> read_program(torch::jit::Graph& original, const torch::jit::Module* self, const ScriptCall& call,
                                 std::span<const std::optional<uint32_t>> leaf_indices);

// Whether a value is or contains a tensor, also in tuples.
bool holds_tensors(const c10::IValue& value);

}  // namespace penstock::capture
