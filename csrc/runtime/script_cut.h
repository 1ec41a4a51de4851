// SPDX-License-Identifier: Apache-2.0
#pragma once
// A TorchScript module cut in two, for programs in C++: a prefix that follows from the batch alone, run by penstock's
// executor wherever the data is made, and the rest, which is TorchScript again and shares the module's parameters.
//
//   auto cut = ScriptCut::make(module, {{images}}, {.mode = graph::CutMode::kMaximal});
//   ...
//   auto boundary = cut.value().run_prefix(leaves);                      // in another thread or process
//   c10::IValue result = cut.value().run_suffix(call, boundary.value()); // where the module is trained
//
// examples/cpp has a whole program.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "capture/program.h"
#include "graph/plan.h"
#include "graph/price.h"
#include "runtime/executor.h"

namespace penstock::runtime {

struct ScriptCutOptions {
  graph::CutMode mode = graph::CutMode::kAuto;
  // Random draws may move, and then come from the generators of the process that runs the prefix.
  bool allow_random = false;
  graph::Prices prices = {};
};

// Thread-compatible; run_prefix calls may overlap with each other and with run_suffix.
class ScriptCut {
 public:
  // Reads the module's forward in the mode (train or eval) it is in, times the movable nodes on the tensors of `call`,
  // which are the batch, and chooses. kUnsupported with the operation and its line when the program cannot be read or
  // its parts give other bits than the whole. The module is not changed, and no random number is drawn.
  static Result<ScriptCut> make(const torch::jit::Module& module, const capture::ScriptCall& call,
                                const ScriptCutOptions& options = {});
  ~ScriptCut();
  ScriptCut(ScriptCut&&) noexcept;
  ScriptCut& operator=(ScriptCut&&) noexcept;

  const graph::Plan& plan() const;

  // The prefix as text with its constants, with which another process can run it (parse_graph, Executor::create).
  std::string prefix_text() const;
  const std::vector<at::Tensor>& prefix_constants() const;

  // Whether the cut is valid for `call`: no attribute of the module was set since it was made (so the mode is the
  // same), and tensors have the same dtypes and ranks. Sizes may differ. If not, call the module.
  bool fits(const capture::ScriptCall& call) const;

  // The boundary tensors for a batch, given by its tensors in the order of the call. Runs with the calling thread's
  // number of threads, without autograd.
  Result<std::vector<at::Tensor>> run_prefix(std::span<const at::Tensor> leaves) const;

  // The module's results, with autograd. Its exceptions pass through.
  c10::IValue run_suffix(const capture::ScriptCall& call, std::span<const at::Tensor> boundary) const;

 private:
  struct Impl;
  explicit ScriptCut(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::runtime
