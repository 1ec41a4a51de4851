// SPDX-License-Identifier: Apache-2.0
#pragma once
// A ScriptCut is one plan of a scripted module and all that its execution needs: the message to the workers, and the
// programs of the trainer, which first_difference() compares. The counterparts for Python programs are
// python/penstock/graph/script_plan.py and python/penstock/cut/whole_comparison.py.

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
#include "graph/repricer.h"

namespace penstock::api {

// Thrown if a program cannot be cut, with the reason.
struct Refusal {
  std::string reason;
};

template <typename T>
T value_or_refuse(Result<T> result) {
  if (!result) throw Refusal{result.error().message};
  return std::move(result).value();
}

// Thread and process settings that TorchScript's compilation depends on.
struct ScriptMode {
  bool has_gradients = false;
  bool is_optimized = false;

  static ScriptMode now();
  auto operator<=>(const ScriptMode&) const = default;  // NOLINT(modernize-use-nullptr): of the 0 in it
};

// The conditions under which a comparison remains valid.
struct ScriptSetting {
  std::vector<std::vector<int64_t>> sizes;
  int thread_count = 0;
  ScriptMode mode;

  auto operator<=>(const ScriptSetting&) const = default;  // NOLINT(modernize-use-nullptr): of the 0 in it
};

// The memory layout of a boundary tensor.
struct BoundaryLayout {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  static std::vector<BoundaryLayout> of(std::span<const at::Tensor> tensors);
  friend bool operator==(const BoundaryLayout&, const BoundaryLayout&) = default;
};

// A planned cut, and what was found while it was in use. Thread-compatible.
struct ScriptCut {
  // A tensor of the module, of which the workers have a copy.
  struct Constant {
    size_t index = 0;  // among the program's constants
    at::Tensor copy;
    const void* address = nullptr;
    uint32_t version = 0;
  };

  std::vector<std::optional<uint32_t>> leaf_indices;
  capture::ScriptCall call;                         // the call that it was planned with
  std::shared_ptr<capture::ScriptProgram> program;  // shared with the cuts that replace this one
  std::shared_ptr<const graph::PricedPlans> plans;
  std::vector<std::optional<c10::Device>> value_devices;  // by value of the program's graph
  std::vector<c10::Device> held_devices;                  // by constant of the program, when it was planned
  std::vector<std::string> keys{};                        // of boundary tensors
  std::vector<std::string> operators{};                   // that make the boundary tensors
  std::vector<std::optional<c10::Device>> devices{};      // of the boundary tensors in the program; none for the CPU
  WorkerSet::Message message{};                           // for the workers; null if no operator moves
  std::optional<capture::ScriptPart> suffix{};            // verified by comparison
  std::optional<capture::ScriptPart> reference{};
  std::vector<Constant> constants{};
  std::shared_ptr<graph::PricedCut> priced{};  // null if plans are not priced again
  // Found while the cut is in use:
  std::map<ScriptMode, int> runs{};                                // of the whole program
  std::map<ScriptSetting, std::vector<BoundaryLayout>> settled{};  // with the verified boundary
  std::set<ScriptSetting> refused{};
  std::vector<int64_t> unchecked{};  // batches used since the last comparison
  uint64_t used_count = 0;

  const graph::Plan& plan() const { return plans->chosen(); }
  // Whether a constant differs from the workers' copy.
  bool has_changed();
  // Whether the module has been moved to another device.
  bool has_moved() const;
  // The devices, other than the CPU, that hold values of the program.
  std::vector<c10::Device> accelerators() const;
};

// Captures the forward of `module` with this call, and plans it. `leaf_indices` has, for each tensor of the call, its
// index in `leaves`, the batch's tensors, on the CPU or on the program's device; none for other tensors. Throws Refusal
// if the module cannot be cut, or if the prefix is not bit-for-bit equal to the module's operators.
ScriptCut plan_script(const torch::jit::Module& module, const capture::ScriptCall& call,
                      std::vector<std::optional<uint32_t>> leaf_indices, const std::vector<at::Tensor>& leaves,
                      const graph::Prices& prices, graph::CutMode mode);

// Cuts the same program with other prices, for calls like the call of `cut`. Does not time operators.
ScriptCut plan_again(const ScriptCut& cut, const torch::jit::Module& module, const capture::ScriptCall& call,
                     const std::vector<at::Tensor>& leaves, const graph::Prices& prices);

// TorchScript profiles and optimizes a program, and the programs of its gradients, from the second run on. From this
// run on the program stays the same.
inline constexpr int kSettledRuns = 4;

// One side of the comparison: a part of the program, and the tensors that it takes in addition to the call.
struct ScriptSide {
  const capture::ScriptPart& part;
  std::span<const at::Tensor> more = {};
};

// Compares the part of a scripted module that stays in the trainer with the whole module, results and gradients, bit
// for bit. Both run on copies of the module with the same random numbers, and the program cannot observe any of it.
// Returns the first kind of difference between the two sides, such as "gradients", or nothing. `devices` are the
// devices that they run on, in addition to the CPU.
std::optional<std::string> first_difference(const torch::jit::Module& module, const capture::ScriptCall& call,
                                            const ScriptSide& whole, const ScriptSide& part,
                                            std::span<const c10::Device> devices);

// Runs a side, forward and backward, as often as TorchScript needs to optimize it.
void settle(const torch::jit::Module& module, const capture::ScriptCall& call, const ScriptSide& side,
            std::span<const c10::Device> devices);

}  // namespace penstock::api
