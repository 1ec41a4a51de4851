// SPDX-License-Identifier: Apache-2.0
#include "api/script_offload.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <utility>

#include "api/batch_origin.h"
#include "api/data_loader_impl.h"
#include "api/module_call.h"
#include "api/script_comparison.h"
#include "api/surroundings.h"
#include "loader/client.h"
#include "penstock/error.h"
#include "runtime/same_bits.h"

namespace penstock {

using api::BoundaryLayout;
using api::Refusal;
using api::ScriptCut;
using capture::ScriptCall;
using capture::ScriptPart;
using Setting = api::ScriptSetting;
using api::value_or_refuse;

namespace {

// How many plans one module may have (its modes, other arguments), and how many refusals.
constexpr size_t kPlansMax = 8;
constexpr size_t kSettingsMax = 64;

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() && !tensor.requires_grad();
}

// For each tensor of the call its number in the batch; none for one from elsewhere. Nothing where the program has
// written to a tensor of the batch: workers have not seen that.
std::optional<std::vector<std::optional<uint32_t>>> indices_of(const std::vector<at::Tensor>& tensors,
                                                               const BatchOrigin& origin) {
  std::vector<std::optional<uint32_t>> indices;
  for (const at::Tensor& tensor : tensors) {
    const auto leaf = std::find_if(origin.leaves.begin(), origin.leaves.end(),
                                   [&](const auto& one) { return one.tensor.is_same(tensor); });
    if (leaf == origin.leaves.end() || !is_plain(tensor)) {
      indices.emplace_back(std::nullopt);
      continue;
    }
    if (!leaf->is_as_it_came()) return std::nullopt;
    indices.emplace_back(static_cast<uint32_t>(leaf - origin.leaves.begin()));
  }
  return indices;
}

graph::CutMode mode_of(OffloadOptions::Cut cut) {
  switch (cut) {
    case OffloadOptions::Cut::kAuto: return graph::CutMode::kAuto;
    case OffloadOptions::Cut::kMaximal: return graph::CutMode::kMaximal;
    case OffloadOptions::Cut::kNone: break;
  }
  return graph::CutMode::kNone;
}

// Which batches were used without a comparison, for people.
std::string spoken_batches(std::vector<int64_t> batches) {
  if (batches.empty()) return "No batch was used without a comparison since the last one that was right";
  std::sort(batches.begin(), batches.end());
  std::string text = "Used without a comparison since the last one that was right: batch ";
  for (size_t first = 0, end = 0; first < batches.size(); first = end) {
    for (end = first + 1; end < batches.size() && batches[end] <= batches[end - 1] + 1;) ++end;
    if (first > 0) text += ", ";
    text += std::to_string(batches[first]);
    if (batches[end - 1] != batches[first]) text += " to " + std::to_string(batches[end - 1]);
  }
  return text;
}

Plan::Group spoken(const graph::PlanGroup& group) {
  return {.label = group.label, .reason = group.reason, .worker_s = group.worker_s, .trainer_s = group.trainer_s};
}

class SmallGroups {
 public:
  // TorchScript keeps groups to differentiate that have few operators; it is a switch of the process, off as a rule.
  explicit SmallGroups(bool keeps_them) : keeps_them_(keeps_them) {
    if (keeps_them_) torch::jit::debugSetAutodiffSubgraphInlining(false);
  }
  SmallGroups(const SmallGroups&) = delete;
  SmallGroups& operator=(const SmallGroups&) = delete;
  ~SmallGroups() {
    if (keeps_them_) torch::jit::debugSetAutodiffSubgraphInlining(true);
  }

 private:
  bool keeps_them_;
};

}  // namespace

OffloadedModule::Impl::Impl(torch::jit::Module module, const std::shared_ptr<api::WorkerSet>& workers,
                            const OffloadOptions& options)
    : module_(std::move(module)), workers_(workers), options_(options) {
  if (options_.verify_every < 1) {
    throw Error(ErrorKind::kValue,
                "verify_every is " + std::to_string(options_.verify_every) + "; 1 or more is expected");
  }
  workers->note_origins();
  if (workers->is_parallel()) return;
  refuse("the loader has num_workers=0, so there is no worker to move anything to");
  is_open_ = false;
}

// ---- Calls

c10::IValue OffloadedModule::Impl::forward(const Batch& batch) {
  const auto method = module_.get_method("forward");
  ScriptCall call{.arguments = api::arguments_of(method.function().getSchema(), batch.value())};
  was_called_ = true;
  std::optional<std::vector<at::Tensor>> boundary;
  ScriptCut* cut = nullptr;
  const BatchOrigin* origin = BatchAccess::origin_of(batch);
  if (is_open_ && origin != nullptr && has_plain_surroundings()) {
    cut = find(call, *origin);
    last_ = cut;
    if (cut != nullptr) boundary = boundary_of(*cut, call, *origin, batch.number());
  }
  if (!boundary) return module_.forward(std::move(call.arguments));
  ++used_count_;
  return cut->suffix->run(&module_, call, *boundary);
}

bool OffloadedModule::Impl::has_plain_surroundings() {
  const auto odd = api::odd_surroundings();
  if (odd) note(*odd);
  return !odd;
}

ScriptCut* OffloadedModule::Impl::find(const ScriptCall& call, const BatchOrigin& origin) {
  auto leaf_indices = indices_of(call.tensors(), origin);
  if (!leaf_indices) {
    note("the program writes to a tensor of the batch before the module is called");
    return nullptr;
  }
  for (const auto& cut : cuts_)
    if (cut->leaf_indices == *leaf_indices && cut->program.holds() && call.is_like(cut->call)) return cut.get();
  if (cuts_.size() + refusal_count_ >= kPlansMax) return nullptr;
  try {
    cuts_.push_back(std::make_unique<ScriptCut>(
        api::plan_script(module_, call, std::move(*leaf_indices), origin.tensors(), prices(), mode_of(options_.cut))));
  } catch (const Refusal& refusal) {
    refuse(refusal.reason);
    return nullptr;
  } catch (const std::exception& error) {
    // Planning is no part of training: whatever goes wrong in it must not end the program's run.
    refuse(std::string("planning failed: ") + error.what());
    return nullptr;
  }
  install();
  return cuts_.back().get();
}

// ---- Planning

graph::Prices OffloadedModule::Impl::prices() const {
  const auto workers = workers_.lock();
  if (!workers || !workers->client()) return graph::local_prices(1);
  const loader::Client& client = *workers->client();
  const double count = std::max(1u, client.worker_count());
  const auto link = client.link();
  if (!link || !workers->is_elsewhere()) return graph::local_prices(count);
  return graph::link_prices(count,
                            {.bytes_per_s = link->bytes_per_s > 0 ? link->bytes_per_s : graph::kUnknownLinkBytesPerS});
}

void OffloadedModule::Impl::install() {
  const auto workers = workers_.lock();
  if (!workers) return;
  std::vector<api::WorkerSet::Message> messages;
  for (const auto& cut : cuts_)
    if (cut->message) messages.push_back(cut->message);
  workers->set_prefixes(std::move(messages));
}

// ---- Proof

std::optional<std::vector<at::Tensor>> OffloadedModule::Impl::boundary_of(ScriptCut& cut, const ScriptCall& call,
                                                                          const BatchOrigin& origin,
                                                                          int64_t batch_number) {
  if (!cut.message) return std::nullopt;
  if (cut.has_changed()) {
    if (++constant_changes_ > 1)
      give_up("a buffer that workers have a copy of keeps changing");
    else
      forget(cut);
    return std::nullopt;
  }
  std::vector<at::Tensor> boundary;
  for (const std::string& key : cut.keys) {
    at::Tensor tensor = origin.find(key);
    if (!tensor.defined()) break;
    boundary.push_back(std::move(tensor));
  }
  Setting setting{.sizes = {}, .thread_count = at::get_num_threads(), .mode = api::ScriptMode::now()};
  int& run_count = cut.runs[setting.mode];
  if (run_count < api::kSettledRuns || boundary.size() < cut.keys.size()) {
    ++run_count;
    return std::nullopt;
  }
  for (const at::Tensor& tensor : call.tensors()) setting.sizes.push_back(tensor.sizes().vec());
  if (cut.refused.contains(setting)) return std::nullopt;
  const bool is_due = cut.used_count % static_cast<uint64_t>(options_.verify_every) == 0;
  const auto settled = cut.settled.find(setting);
  if (is_due || settled == cut.settled.end()) {
    if (!is_right(cut, call, boundary, setting, batch_number)) return std::nullopt;
    cut.unchecked.clear();
    if (cut.settled.size() >= kSettingsMax) cut.settled.clear();
    cut.settled.insert_or_assign(std::move(setting), BoundaryLayout::of(boundary));
  } else if (settled->second != BoundaryLayout::of(boundary)) {
    return std::nullopt;
  } else {
    cut.unchecked.push_back(batch_number);
  }
  ++cut.used_count;
  return boundary;
}

bool OffloadedModule::Impl::is_right(ScriptCut& cut, const ScriptCall& call, const std::vector<at::Tensor>& boundary,
                                     const Setting& setting, int64_t batch_number) {
  const c10::IValue expected = [&] {
    const at::NoGradGuard no_grad;
    return cut.reference->run(&module_, call, {});
  }();
  for (size_t index = 0; index < boundary.size(); ++index) {
    if (runtime::is_same_bits(boundary[index], expected.toTupleRef().elements()[index].toTensor())) continue;
    give_up("the workers' result of " + cut.operators[index] + " differs from the trainer's own in batch " +
            std::to_string(batch_number) + ". " + spoken_batches(cut.unchecked));
    return false;
  }
  if (cut.settled.contains(setting)) return true;
  const ScriptPart whole = capture::whole_program(module_);
  api::settle(module_, call, {.part = whole});
  std::optional<std::string> difference = "kernels";
  for (const bool keeps_small_groups : {false, true}) {
    const bool is_optimized = !whole.optimized_operators().empty();
    if (keeps_small_groups && !is_optimized) break;
    const SmallGroups small_groups(keeps_small_groups);
    ScriptPart suffix = value_or_refuse(cut.program.suffix(cut.plan, is_optimized));
    api::settle(module_, call, {.part = suffix, .more = boundary});
    // One batch does not show every rounding: the program that is put together has to be the same, too.
    if (!cut.program.is_optimized_alike(cut.plan, whole, suffix)) continue;
    cut.suffix = std::move(suffix);
    difference = api::first_difference(module_, call, {.part = whole}, {.part = *cut.suffix, .more = boundary});
    break;
  }
  if (!difference) return true;
  cut.refused.insert(setting);
  refuse("run by TorchScript without the calls that move, the model has other " + *difference);
  return false;
}

// ---- What the program is told

void OffloadedModule::Impl::refuse(const std::string& reason) {
  ++refusal_count_;
  note(reason);
}

void OffloadedModule::Impl::note(const std::string& reason) {
  if (std::find(refusals_.begin(), refusals_.end(), reason) != refusals_.end()) return;
  refusals_.push_back(reason);
  if (refusals_.size() == 1) {
    TORCH_WARN("penstock: the module runs whole in the trainer: ", reason);
  }
}

void OffloadedModule::Impl::give_up(const std::string& reason) {
  refuse(reason);
  is_open_ = false;
  cuts_.clear();
  last_ = nullptr;
  install();
}

void OffloadedModule::Impl::forget(const ScriptCut& cut) {
  std::erase_if(cuts_, [&](const auto& one) { return one.get() == &cut; });
  last_ = nullptr;
  install();
}

Plan OffloadedModule::Impl::plan() const {
  Plan plan{.refused = refusals_};
  if (!was_called_ && plan.refused.empty())
    plan.refused.push_back("the module was not called yet, and is planned then");
  if (last_ == nullptr) return plan;
  for (const graph::PlanGroup& group : last_->plan.moved) plan.moved.push_back(spoken(group));
  for (const graph::PlanGroup& group : last_->plan.kept) plan.kept.push_back(spoken(group));
  plan.raw_bytes = last_->plan.raw_bytes;
  plan.boundary_bytes = last_->plan.boundary_bytes;
  return plan;
}

// ---- The public face

OffloadedModule::OffloadedModule() = default;
OffloadedModule::~OffloadedModule() = default;
OffloadedModule::OffloadedModule(OffloadedModule&&) noexcept = default;
OffloadedModule& OffloadedModule::operator=(OffloadedModule&&) noexcept = default;
c10::IValue OffloadedModule::forward(const Batch& batch) { return impl_->forward(batch); }
Plan OffloadedModule::plan() const { return impl_->plan(); }
uint64_t OffloadedModule::used_count() const { return impl_->used_count(); }

struct OffloadAccess {
  static OffloadedModule make(torch::jit::Module module, DataLoader& loader, const OffloadOptions& options) {
    OffloadedModule offloaded;
    offloaded.impl_ =
        std::make_unique<OffloadedModule::Impl>(std::move(module), LoaderAccess::workers_of(loader), options);
    return offloaded;
  }
};

OffloadedModule offload(torch::jit::Module module, DataLoader& loader, OffloadOptions options) {
  return OffloadAccess::make(std::move(module), loader, options);
}

}  // namespace penstock
