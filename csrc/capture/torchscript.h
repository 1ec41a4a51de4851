// SPDX-License-Identifier: Apache-2.0
#pragma once
// A ReadProgram is the result of reading a TorchScript program: its graph, the program written out as it was read, and
// the module attributes that were read with it. capture_torchscript() (capture.h) is implemented here, too.
//
// The program is inlined, and mutations that torch can prove harmless are removed. The rest is read from top to bottom:
// attributes, flags and branches on them are computed now, and nodes are emitted for everything else. Branches and
// loops that can only be decided at run time become one node each, which stays.

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/ir/ir.h>

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "capture/capture.h"
#include "capture/program.h"
#include "graph/ir.h"

namespace penstock::capture {

// Whether two values are the same: the same tensors, modules and objects, equal numbers and strings, element by
// element.
bool is_same_value(const c10::IValue& a, const c10::IValue& b);

// The module attributes that were read together with a program. Values computed from them while reading are valid as
// long as the attributes do not change.
class ReadAttributes {
 public:
  // Reads the attribute `name` of `owner`, a module.
  c10::IValue read(const c10::IValue& owner, const std::string& name);

  // Whether all attributes still have the values that were read.
  bool hold() const;

 private:
  struct Attribute {
    c10::IValue owner;
    std::string name;
    c10::IValue value;  // lists are copies
  };
  std::vector<Attribute> attributes_;
};

// "aten::mul at model.py:12:8"
std::string place_of(const torch::jit::Node* node);

// A place without its operator: " at file:line:column".
std::string line_of(const std::string& place);

// A TorchScript program written out as it was read: branches taken, loops unrolled, one node for each node read. With
// some nodes removed it is a program again, over the module's original parameters. Confined to the thread that reads;
// afterwards thread-compatible.
class WrittenProgram {
 public:
  // Takes the inputs of `program`.
  explicit WrittenProgram(const torch::jit::Graph& program);

  // Appends a copy of `node`, with its blocks. Later readers of the results of `node` read the copy's results.
  void append(const torch::jit::Node* node);

  // Makes later readers of `value` read the present value of `other`, or a number.
  void stand_in(const torch::jit::Value* value, const torch::jit::Value* other);
  void stand_in(const torch::jit::Value* value, int64_t number);
  void stand_in_all(const std::vector<const torch::jit::Value*>& values,
                    const std::vector<const torch::jit::Value*>& others);  // simultaneously

  // Records that the present value of `value` is the graph's `id`. The first record for an id counts.
  void name(graph::ValueId id, const torch::jit::Value* value);

  // Sets the program's results.
  void finish(const torch::jit::Graph& program);

  // Returns the program that takes `values` as further arguments, after its original ones, without the nodes that
  // compute them. Returns kUnsupported, naming a node of `gone`, if that node cannot be left out.
  Result<std::shared_ptr<torch::jit::Graph>> without(const std::vector<graph::ValueId>& values,
                                                     const std::vector<graph::ValueId>& gone) const;

  // The source lines at which the values are made; without `values`, all source lines.
  std::set<std::string> lines(const std::vector<graph::ValueId>& values) const;
  std::set<std::string> lines() const;

  // Returns the program that only returns `values`, as one tuple.
  Result<std::shared_ptr<torch::jit::Graph>> computing(const std::vector<graph::ValueId>& values) const;

 private:
  using ValueMap = std::unordered_map<const torch::jit::Value*, torch::jit::Value*>;

  torch::jit::Value* copy_of(const torch::jit::Value* value) const;
  // Returns a copy of the program so far, and in `values` the copies of its values.
  std::shared_ptr<torch::jit::Graph> duplicate(ValueMap& values) const;
  Result<std::vector<torch::jit::Value*>> find(const std::vector<graph::ValueId>& ids, const ValueMap& values) const;

  std::shared_ptr<torch::jit::Graph> written_;
  ValueMap copies_;  // by value of the program that is read
  std::unordered_map<graph::ValueId, torch::jit::Value*> named_;
};

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
