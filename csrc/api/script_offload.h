// SPDX-License-Identifier: Apache-2.0
#pragma once
// The cuts of one scripted module for one loader: planned at a call, proved by comparison before they are used, and
// left wherever something does not fit. It is what python/penstock/cut/script_models.py does for Python's programs.

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
#include "api/script_pricing.h"
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
  // A call on a batch. In the places of leaves that are with a worker still it has tensors without memory of their own.
  struct Call {
    Call(const c10::FunctionSchema& schema, const Batch& batch);

    bool is_whole() const { return origin == nullptr || origin->missing().empty(); }
    // Has all leaves come: for the module to read those that are its arguments, or for a comparison alone.
    void complete(bool is_check);

    const c10::FunctionSchema& schema;
    const Batch& batch;
    BatchOrigin* const origin;  // null for a batch that came before anything was offloaded to its loader
    capture::ScriptCall values;
  };

  bool has_plain_surroundings();
  api::ScriptCut* find(Call& call);
  graph::Prices prices() const;
  // The cut, or the one that takes its place from this batch on.
  api::ScriptCut* repriced(api::ScriptCut* cut, Call& call);
  void install();
  // The boundary tensors of the batch, if the cut may be used for the call. The cut may be gone afterwards if not.
  std::optional<std::vector<at::Tensor>> boundary_of(api::ScriptCut& cut, Call& call);
  // The same; what fails in it ends the cut.
  std::optional<std::vector<at::Tensor>> try_boundary_of(api::ScriptCut& cut, Call& call);
  bool is_right(api::ScriptCut& cut, const capture::ScriptCall& call, const std::vector<at::Tensor>& boundary,
                const api::ScriptSetting& setting, int64_t batch_number);
  // Tells the loader what the call has read of its batch, for leaves that may stay with the workers.
  // `cut` is the one that it has, or null.
  void note_call(const Call& call, const api::ScriptCut* cut);
  // Notes why a program cannot be cut, or why a call ran whole.
  void refuse(const std::string& reason);
  void note(const std::string& reason);
  void give_up(const std::string& reason);
  void forget(const api::ScriptCut& cut);

  torch::jit::Module module_;
  std::weak_ptr<api::WorkerSet> workers_;  // of the loader, which may be gone
  OffloadOptions options_;
  bool is_open_ = true;                        // false once cutting was given up
  std::optional<api::ScriptPricing> pricing_;  // with Cut::kAuto
  std::unique_ptr<api::ScriptCut> left_;       // by the newest change of a plan
  std::vector<std::unique_ptr<api::ScriptCut>> cuts_;
  std::vector<std::string> refusals_;
  size_t refusal_count_ = 0;
  int constant_changes_ = 0;
  const api::ScriptCut* last_ = nullptr;  // that the last call was planned with
  std::shared_ptr<api::ReadLeaves>
      reads_before_;  // of the batch before, which the program may have read after its call
  bool was_called_ = false;
  uint64_t used_count_ = 0;
  const pid_t owner_pid_;
};

}  // namespace penstock
