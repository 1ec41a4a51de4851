// SPDX-License-Identifier: Apache-2.0
#pragma once
// The cuts of one scripted module for one loader: planned at a call, proved by comparison before they are used, and
// left wherever something does not fit. It is what python/penstock/cut/script_models.py does for Python's programs.

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "api/worker_set.h"
#include "capture/program.h"
#include "graph/plan.h"
#include "penstock/offload.h"

namespace penstock {

class PENSTOCK_HIDDEN OffloadedModule::Impl {
 public:
  Impl(torch::jit::Module module, const std::shared_ptr<api::WorkerSet>& workers, const OffloadOptions& options);

  c10::IValue forward(const Batch& batch);
  Plan plan() const;
  uint64_t used_count() const { return used_count_; }

 private:
  // Under which a comparison holds: sizes of the tensors, and whether there are gradients.
  struct Setting {
    std::vector<std::vector<int64_t>> sizes{};
    int thread_count = 0;
    bool has_gradients = false;

    auto operator<=>(const Setting&) const = default;
  };
  struct Constant {
    size_t index = 0;  // among the program's
    at::Tensor copy;
    const void* address = nullptr;
    uint64_t version = 0;
  };
  struct Cut {
    std::vector<std::optional<uint32_t>> leaf_indices;
    capture::ScriptCall call;  // the one that it was planned with
    capture::ScriptProgram program;
    graph::Plan plan;
    std::vector<std::string> keys{};              // of boundary tensors
    std::vector<std::string> operators{};         // that make them
    api::WorkerSet::Message message{};            // to the workers; null where nothing moves
    std::optional<capture::ScriptPart> suffix{};  // as it was found to be right
    std::optional<capture::ScriptPart> reference{};
    std::vector<Constant> constants{};
    std::map<bool, int> runs{};  // of the whole, by whether there are gradients
    std::set<Setting> settled{};
    std::set<Setting> refused{};
    uint64_t used_count = 0;
  };

  Cut* find(const capture::ScriptCall& call, const std::vector<std::optional<uint32_t>>& leaf_indices,
            const std::vector<at::Tensor>& leaves);
  Cut make(const capture::ScriptCall& call, std::vector<std::optional<uint32_t>> leaf_indices,
           const std::vector<at::Tensor>& leaves);
  graph::Prices prices() const;
  void install();
  // The boundary tensors of the batch, if the cut may be used for the call.
  std::optional<std::vector<at::Tensor>> boundary_of(Cut& cut, const capture::ScriptCall& call, const Batch& batch);
  bool is_right(Cut& cut, const capture::ScriptCall& call, const std::vector<at::Tensor>& boundary,
                const Setting& setting, int64_t batch_number);
  bool has_changed(Cut& cut) const;
  void refuse(const std::string& reason);
  void give_up(const std::string& reason);

  torch::jit::Module module_;
  std::weak_ptr<api::WorkerSet> workers_;  // of the loader, which may be gone
  OffloadOptions options_;
  bool is_open_ = true;  // false once cutting was given up
  std::vector<std::unique_ptr<Cut>> cuts_;
  std::vector<std::string> refusals_;
  size_t refusal_count_ = 0;
  int constant_changes_ = 0;
  const Cut* last_ = nullptr;  // that the last call was planned with
  bool was_called_ = false;
  uint64_t used_count_ = 0;
};

}  // namespace penstock
