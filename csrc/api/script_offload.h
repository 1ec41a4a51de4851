// SPDX-License-Identifier: Apache-2.0
#pragma once
// OffloadedModule::Impl holds the cuts of one scripted module for one loader: planned at a call, verified by comparison
// before use, and abandoned when a check fails. The counterpart for Python programs is
// python/penstock/cut/script_models.py. The public functions of OffloadedModule and Plan are implemented here, too.

#include <ATen/core/ivalue.h>
#include <sys/types.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/batch_origin.h"
#include "api/script_cut.h"
#include "api/step_meter.h"
#include "api/worker_set.h"
#include "capture/program.h"
#include "graph/price.h"
#include "penstock/offload.h"

namespace penstock {

class PENSTOCK_HIDDEN OffloadedModule::Impl {
 public:
  Impl(torch::jit::Module module, const std::shared_ptr<api::WorkerSet>& workers, const OffloadOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  c10::IValue forward(const Batch& batch);
  Plan plan() const;
  uint64_t used_count() const { return used_count_; }

 private:
  // A call on a batch. Leaves that are still with a worker are represented by placeholder tensors without own memory.
  struct Call {
    Call(const c10::FunctionSchema& schema, const Batch& batch);

    bool is_whole() const { return origin == nullptr || origin->missing().empty(); }
    // Fetches all leaves: either because the module reads its arguments, or only for a comparison.
    void complete(bool is_check);

    const c10::FunctionSchema& schema;
    const Batch& batch;
    BatchOrigin* const origin;  // null for a batch delivered before any module was offloaded to its loader
    capture::ScriptCall values;
  };

  bool has_plain_surroundings();
  api::ScriptCut* find(Call& call);
  graph::Prices prices() const;
  // The cut, or the one that replaces it from this batch on.
  api::ScriptCut* repriced(api::ScriptCut* cut, Call& call);
  void install();
  // The boundary tensors of the batch, if the cut may be used for the call. Otherwise the cut may have been removed.
  std::optional<std::vector<at::Tensor>> boundary_of(api::ScriptCut& cut, Call& call);
  // The same, but a failure ends the cut.
  std::optional<std::vector<at::Tensor>> try_boundary_of(api::ScriptCut& cut, Call& call);
  bool is_right(api::ScriptCut& cut, const capture::ScriptCall& call, const std::vector<at::Tensor>& boundary,
                const api::ScriptSetting& setting, int64_t batch_number);
  // Reports to the loader which leaves of its batch the call has read, so that others may stay with the workers. `cut`
  // is the call's cut, or null.
  void note_call(const Call& call, const api::ScriptCut* cut);
  // Records why a program cannot be cut, or why a call ran whole.
  void refuse(const std::string& reason);
  void note(const std::string& reason);
  void give_up(const std::string& reason);
  void forget(const api::ScriptCut& cut);

  torch::jit::Module module_;
  std::weak_ptr<api::WorkerSet> workers_;  // of the loader, which may be gone
  OffloadOptions options_;
  bool is_open_ = true;                        // false once cutting was given up
  std::optional<api::ScriptPricing> pricing_;  // with Cut::kAuto
  std::unique_ptr<api::ScriptCut> left_;       // the cut that the last change of plan replaced
  std::vector<std::unique_ptr<api::ScriptCut>> cuts_;
  std::vector<std::string> refusals_;
  size_t refusal_count_ = 0;
  int constant_changes_ = 0;
  const api::ScriptCut* last_ = nullptr;  // the cut of the last call
  std::shared_ptr<api::ReadLeaves>
      reads_before_;  // of the previous batch, which the program may have read after its call
  bool was_called_ = false;
  uint64_t used_count_ = 0;
  const pid_t owner_pid_;
};

}  // namespace penstock
