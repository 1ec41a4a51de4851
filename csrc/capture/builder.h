// SPDX-License-Identifier: Apache-2.0
#pragma once
// Builds the graph of a TorchScript program: its inputs when they are first used, its nodes as they are read.

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>

#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "capture/bound.h"
#include "capture/capture.h"
#include "capture/ranks.h"

namespace penstock::capture {

// Thread-compatible. Throws Refusal.
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
  void turn_written_into_state();

  std::span<const at::Tensor> tensors_given_;
  std::span<const std::optional<uint32_t>> leaf_indices_;
  size_t taken_count_ = 0;
  Captured captured_;
  Ranks ranks_;
  std::unordered_map<const c10::TensorImpl*, graph::ValueId> tensors_;
  std::unordered_map<graph::ValueId, graph::Device> devices_;  // of inputs
};

}  // namespace penstock::capture
