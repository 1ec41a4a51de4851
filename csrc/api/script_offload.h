// SPDX-License-Identifier: Apache-2.0
#pragma once
// The cuts of one scripted module for one loader: planned at a call, proved by comparison before they are used, and
// left wherever something does not fit. It is what python/penstock/cut/script_models.py does for Python's programs.

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/batch_origin.h"
#include "api/script_cut.h"
#include "api/worker_set.h"
#include "capture/program.h"
#include "graph/price.h"
#include "penstock/offload.h"

namespace penstock {

class PENSTOCK_HIDDEN OffloadedModule::Impl {
 public:
  Impl(torch::jit::Module module, const std::shared_ptr<api::WorkerSet>& workers, const OffloadOptions& options);

  c10::IValue forward(const Batch& batch);
  Plan plan() const;
  uint64_t used_count() const { return used_count_; }

 private:
  bool has_plain_surroundings();
  api::ScriptCut* find(const capture::ScriptCall& call, const BatchOrigin& origin);
  graph::Prices prices() const;
  void install();
  // The boundary tensors of the batch, if the cut may be used for the call. The cut may be gone afterwards if not.
  std::optional<std::vector<at::Tensor>> boundary_of(api::ScriptCut& cut, const capture::ScriptCall& call,
                                                     const BatchOrigin& origin, int64_t batch_number);
  bool is_right(api::ScriptCut& cut, const capture::ScriptCall& call, const std::vector<at::Tensor>& boundary,
                const api::ScriptSetting& setting, int64_t batch_number);
  // Notes why a program cannot be cut, or why a call ran whole.
  void refuse(const std::string& reason);
  void note(const std::string& reason);
  void give_up(const std::string& reason);
  void forget(const api::ScriptCut& cut);

  torch::jit::Module module_;
  std::weak_ptr<api::WorkerSet> workers_;  // of the loader, which may be gone
  OffloadOptions options_;
  bool is_open_ = true;  // false once cutting was given up
  std::vector<std::unique_ptr<api::ScriptCut>> cuts_;
  std::vector<std::string> refusals_;
  size_t refusal_count_ = 0;
  int constant_changes_ = 0;
  const api::ScriptCut* last_ = nullptr;  // that the last call was planned with
  bool was_called_ = false;
  uint64_t used_count_ = 0;
};

}  // namespace penstock
