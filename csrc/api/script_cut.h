// SPDX-License-Identifier: Apache-2.0
#pragma once
// One plan of a scripted module and all that it takes to carry it out: what workers are sent, and the programs of the
// trainer. It is what python/penstock/graph/script_plan.py makes for Python's programs.

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "api/worker_set.h"
#include "base/result.h"
#include "capture/program.h"
#include "graph/plan.h"
#include "graph/price.h"
#include "graph/priced_cut.h"
#include "graph/priced_plans.h"

namespace penstock::api {

// A program that cannot be cut, and why.
struct Refusal {
  std::string reason;
};

template <typename T>
T value_or_refuse(Result<T> result) {
  if (!result) throw Refusal{result.error().message};
  return std::move(result).value();
}

// Settings of the thread and the process that TorchScript compiles by.
struct ScriptMode {
  bool has_gradients = false;
  bool is_optimized = false;

  static ScriptMode now();
  auto operator<=>(const ScriptMode&) const = default;  // NOLINT(modernize-use-nullptr): of the 0 in it
};

// Under which a comparison holds.
struct ScriptSetting {
  std::vector<std::vector<int64_t>> sizes;
  int thread_count = 0;
  ScriptMode mode;

  auto operator<=>(const ScriptSetting&) const = default;  // NOLINT(modernize-use-nullptr): of the 0 in it
};

// How a boundary tensor lies in memory.
struct BoundaryLayout {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  static std::vector<BoundaryLayout> of(std::span<const at::Tensor> tensors);
  friend bool operator==(const BoundaryLayout&, const BoundaryLayout&) = default;
};

// Thread-compatible.
struct ScriptCut {
  // A tensor of the module's that workers have a copy of.
  struct Constant {
    size_t index = 0;  // among the program's
    at::Tensor copy;
    const void* address = nullptr;
    uint32_t version = 0;
  };

  std::vector<std::optional<uint32_t>> leaf_indices;
  capture::ScriptCall call;                         // the one that it was planned with
  std::shared_ptr<capture::ScriptProgram> program;  // shared with the cuts that take this one's place
  std::shared_ptr<const graph::PricedPlans> plans;
  std::vector<std::optional<c10::Device>> value_devices;  // by value of the program's graph
  std::vector<c10::Device> held_devices;                  // by constant of the program, as it was planned
  std::vector<std::string> keys{};                        // of boundary tensors
  std::vector<std::string> operators{};                   // that make them
  std::vector<std::optional<c10::Device>> devices{};      // where the program has them; none for the CPU
  WorkerSet::Message message{};                           // to the workers; null where nothing moves
  std::optional<capture::ScriptPart> suffix{};            // as it was found to be right
  std::optional<capture::ScriptPart> reference{};
  std::vector<Constant> constants{};
  std::shared_ptr<graph::PricedCut> priced{};  // null where plans are not priced again
  // What was found while the cut was used:
  std::map<ScriptMode, int> runs{};                                // of the whole
  std::map<ScriptSetting, std::vector<BoundaryLayout>> settled{};  // with the boundary that was right
  std::set<ScriptSetting> refused{};
  std::vector<int64_t> unchecked{};  // batches that were used since the last comparison
  uint64_t used_count = 0;

  const graph::Plan& plan() const { return plans->chosen(); }
  // Whether one of the constants is another than the workers have.
  bool has_changed();
  // Whether the module has been moved to another device.
  bool has_moved() const;
  // All that the program has values on, but for the CPU.
  std::vector<c10::Device> accelerators() const;
};

// Reads the forward of `module` as it is called, and plans for it. `leaf_indices` has, for each tensor of the call, its
// number among `leaves`, which are the batch, on the CPU or on the program's device; none for a tensor from elsewhere.
// Throws Refusal where the module cannot be cut, or where the prefix gives other bits than the module's own operators.
ScriptCut plan_script(const torch::jit::Module& module, const capture::ScriptCall& call,
                      std::vector<std::optional<uint32_t>> leaf_indices, const std::vector<at::Tensor>& leaves,
                      const graph::Prices& prices, graph::CutMode mode);

// The same program cut by other prices, for calls like those of `cut`. Nothing is timed.
ScriptCut plan_again(const ScriptCut& cut, const torch::jit::Module& module, const capture::ScriptCall& call,
                     const std::vector<at::Tensor>& leaves, const graph::Prices& prices);

}  // namespace penstock::api
