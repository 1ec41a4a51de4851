// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CaptureBuilder builds the graph of a TorchScript program: its inputs when they are first used, its nodes as they
// are read. Ranks tracks the dimensions of its tensors, Bound is the meaning of one value, and ProgramValues holds the
// meanings of all values read so far.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/ir/ir.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "capture/capture.h"
#include "graph/ir.h"
#include "graph/size_ops.h"

namespace penstock::capture {

// The number of dimensions of a program's tensors, if it follows from its inputs' numbers of dimensions for any sizes.
// Branches on it, such as the ones in a scripted `interpolate`, are decided while the program is read. Confined to the
// thread that reads.
class Ranks {
 public:
  void set(graph::ValueId value, size_t rank) { ranks_.insert_or_assign(value, rank); }
  std::optional<size_t> find(graph::ValueId value) const;
  // Call after reading a call. A call that may change the dimensions of a tensor in place discards all known ranks.
  void note_call(const graph::Node& call);

 private:
  std::optional<size_t> rank_of(const graph::Argument& argument) const;
  // The maximal number of dimensions of the operands; none if it is unknown for one of them.
  std::optional<size_t> broadcast_rank(const graph::Node& call) const;

  std::unordered_map<graph::ValueId, size_t> ranks_;
};

// The meaning of a TorchScript value while its program is read: a part of the graph, or a value known now.
struct Bound {
  enum class Kind : uint8_t {
    kArgument,  // a literal, a value of the graph, or a list of them
    kTuple,     // tuples, and lists and dicts of values that cannot be arguments
    kObject,    // a module, or a value that has no form in the graph and must not be used
  };
  Kind kind = Kind::kArgument;
  graph::Argument argument;
  bool is_number_tensor = false;  // a number that traced programs hold as a 0-dim tensor
  std::vector<Bound> items;
  c10::IValue object;
  std::string path;  // of the object: its name in the program

  static Bound of_argument(graph::Argument argument);
  static Bound of_number(const graph::Number& number);
  static Bound of_object(c10::IValue object, std::string path);
  static Bound of_tuple(std::vector<Bound> items);
  static Bound of_list(std::vector<Bound> items);  // an argument if all items are, else a tuple

  bool is_none() const { return kind == Kind::kArgument && argument.get<graph::None>() != nullptr; }

  // The graph value, or null if this is not one.
  const graph::ValueRef* value() const { return kind == Kind::kArgument ? argument.get<graph::ValueRef>() : nullptr; }

  // The number, if this is one that is known now.
  std::optional<graph::Number> number() const;

  // The elements of a tuple, or of a list whose elements are known one by one.
  std::optional<std::vector<Bound>> elements() const;
};

// Thrown to leave nested blocks of a program that cannot be captured; capture_torchscript() turns it into a Fault. It
// does not leave any other public function.
struct Refusal {
  std::string message;
};

// The graph of a program, as far as it was read. Throws Refusal. Thread-compatible.
class CaptureBuilder {
 public:
  // `tensors` are the tensor arguments of forward, and `leaf_indices` their numbers in the batch; none for a tensor
  // from elsewhere.
  CaptureBuilder(std::span<const at::Tensor> tensors, std::span<const std::optional<uint32_t>> leaf_indices)
      : tensors_given_(tensors), leaf_indices_(leaf_indices) {}

  // Returns the next tensor, or a tuple of the next tensors, for an argument of forward.
  Bound leaf(const c10::TypePtr& type, const std::string& name);

  // Returns a value that is known now: an attribute or a constant of the program. Tensors become inputs, each once.
  Bound known(const c10::IValue& value, const std::string& path);

  // The number of dimensions of a tensor, if it is known.
  std::optional<size_t> rank_of(const Bound& bound) const;

  // The device of an input, if the value is one.
  std::optional<graph::Device> device_of(const Bound& bound) const;

  // Whether a value is made by control flow that is kept whole, so that it may be None.
  bool may_be_none(const Bound& bound) const;

  // Appends a node that forms a separate group, and returns its results. `place`, "aten::add at model.py:12", is its
  // label.
  std::vector<Bound> append(graph::Node node, size_t result_count, const std::string& place);

  // Appends a call with positional arguments and one result, and returns the result.
  Bound emit(std::string op, std::vector<graph::Argument> arguments, const std::string& place);

  // Makes every value in `bound` an output. Values that are known now are left out.
  void add_output(const Bound& bound);

  // Returns the annotated graph; tensors that it writes are state. All leaves must have been taken.
  Captured finish();

 private:
  graph::ValueId new_value();
  graph::Input tensor_input(const at::Tensor& tensor, const std::string& source);
  Bound constant(const at::Tensor& tensor, const std::string& source);
  void convert_written_to_state();

  std::span<const at::Tensor> tensors_given_;
  std::span<const std::optional<uint32_t>> leaf_indices_;
  size_t taken_count_ = 0;
  Captured captured_;
  Ranks ranks_;
  std::unordered_map<const c10::TensorImpl*, graph::ValueId> tensors_;
  std::unordered_map<graph::ValueId, graph::Device> devices_;  // of inputs
};

// "aten::add at model.py:12", for messages.
std::string where(const torch::jit::Node* node);

// Throws a Refusal with the reason why `node` cannot be captured.
[[noreturn]] void refuse(const torch::jit::Node* node, const std::string& why);

// The meanings of a TorchScript program's values read so far, and the graph that is built meanwhile. Throws Refusal.
// Confined to the thread that reads.
class ProgramValues {
 public:
  // As for CaptureBuilder.
  ProgramValues(std::span<const at::Tensor> tensors, std::span<const std::optional<uint32_t>> leaf_indices)
      : builder_(tensors, leaf_indices) {}

  // Returns the meaning of a value, which must have been bound; find() returns null for an unbound value.
  const Bound& lookup(const torch::jit::Value* value) const;
  const Bound* find(const torch::jit::Value* value) const;

  std::vector<Bound> inputs_of(const torch::jit::Node* node) const;

  // Returns the graph values among `values`, including values in tuples and lists. Unbound values are left out.
  std::vector<graph::Argument> of_graph(const std::vector<const torch::jit::Value*>& values) const;

  void bind(const torch::jit::Value* value, Bound bound);

  // Appends `call` to the graph, and binds the results of `node` to the call's.
  void bind_call(const torch::jit::Node* node, graph::Node call);

  // Appends a call with positional arguments that represents `node`, and returns its one result.
  Bound emit(const torch::jit::Node* node, std::string op, std::vector<graph::Argument> arguments);

  CaptureBuilder& builder() { return builder_; }

 private:
  CaptureBuilder builder_;
  std::unordered_map<const torch::jit::Value*, Bound> bounds_;
};

}  // namespace penstock::capture
