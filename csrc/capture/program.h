// SPDX-License-Identifier: Apache-2.0
#pragma once
// A ScriptProgram is a TorchScript program that was read with an example call (ScriptCall), so that a plan for its
// graph can be applied to it. The suffix of a plan is a ScriptPart, a program that runs like any other.
// content_digest() (capture.h) is implemented here, too.

#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "capture/capture.h"
#include "graph/ir.h"
#include "graph/plan.h"

namespace penstock::capture {

// The arguments of forward except the module itself: one value for each of its parameters, including defaults.
struct ScriptCall {
  std::vector<c10::IValue> arguments;

  // The tensors in the arguments, including tensors in tuples, in their order.
  std::vector<at::Tensor> tensors() const;

  // Returns the same call with other tensors in their places.
  ScriptCall with_tensors(std::span<const at::Tensor> tensors) const;

  // Whether a program that was read with `other` is valid for this call: tensors have the same dtypes, ranks, devices
  // and layouts, and all other values are the same. Sizes may differ.
  bool is_like(const ScriptCall& other) const;
};

// Keeps a module alive, for callers that do not know the type of modules. Shares the module's parameters.
class ModuleHandle {
 public:
  explicit ModuleHandle(const torch::jit::Module& module);
  const torch::jit::Module* get() const { return module_.get(); }

 private:
  std::shared_ptr<const torch::jit::Module> module_;  // shared by copies of this handle
};

// A separate program that runs like any TorchScript program: with autograd and its optimizer. Thread-compatible.
class ScriptPart {
 public:
  // Takes the module (null for a function), the call, and the program's further inputs. Throws the program's
  // exceptions.
  c10::IValue run(const torch::jit::Module* module, const ScriptCall& call, std::span<const at::Tensor> more) const;

  // The operators that TorchScript's optimizer has grouped for differentiation or fusion, each with its place in the
  // source, sorted. Empty before the program has been optimized. If these differ, so may the rounding.
  std::vector<std::string> optimized_operators() const;

  explicit ScriptPart(std::shared_ptr<torch::jit::Function> function) : function_(std::move(function)) {}

 private:
  std::shared_ptr<torch::jit::Function> function_;  // shared by copies of this part: it compiles itself once
};

// A program that was read, with its graph. Holds the module's attributes that were read. Thread-compatible.
class ScriptProgram {
 public:
  // Reads the forward of `module` in its present mode (train or eval). `leaf_indices` has, for each tensor of the call,
  // its number in the batch; none for a tensor from elsewhere, which stays. Control flow that depends on contents is
  // kept as it is. Returns kUnsupported with the operation and its line if the program cannot be read.
  static Result<ScriptProgram> read(const torch::jit::Module& module, const ScriptCall& call,
                                    std::span<const std::optional<uint32_t>> leaf_indices);
  static Result<ScriptProgram> read(torch::jit::Function& function, const ScriptCall& call,
                                    std::span<const std::optional<uint32_t>> leaf_indices);
  ~ScriptProgram();
  ScriptProgram(ScriptProgram&&) noexcept;
  ScriptProgram& operator=(ScriptProgram&&) noexcept;

  const graph::Graph& graph() const;                 // annotated
  const std::vector<at::Tensor>& constants() const;  // of its const and state inputs, in their order

  // Whether every attribute still has the value that was read. Contents of tensors are not compared.
  bool holds() const;

  // Returns the program without the nodes that `plan` moves; after its original arguments it takes the boundary tensors
  // of `plan`. Optimized by TorchScript, or run operator by operator.
  Result<ScriptPart> suffix(const graph::Plan& plan, bool is_optimized = true) const;

  // Whether the optimizer has treated `part`, a suffix by `plan`, like `whole`: the nodes that stay are differentiated
  // and fused in both or in neither. Call once both have run often enough to be optimized.
  bool is_optimized_alike(const graph::Plan& plan, const ScriptPart& whole, const ScriptPart& part) const;

  // Returns the program that only computes these values of the graph, as one tuple.
  Result<ScriptPart> computing(const std::vector<graph::ValueId>& values) const;

 private:
  std::vector<graph::ValueId> made_by_workers(const graph::Plan& plan) const;

  struct Impl;
  explicit ScriptProgram(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The forward of a module, or a function, unchanged.
ScriptPart whole_program(const torch::jit::Module& module);
ScriptPart whole_program(torch::jit::Function& function);

}  // namespace penstock::capture
