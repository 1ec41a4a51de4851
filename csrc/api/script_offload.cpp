// SPDX-License-Identifier: Apache-2.0
#include "api/script_offload.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <utility>

#include "api/batch_origin.h"
#include "api/data_loader_impl.h"
#include "api/module_call.h"
#include "api/script_cut.h"
#include "api/surroundings.h"
#include "loader/client.h"
#include "penstock/error.h"
#include "penstock/offload.h"
#include "runtime/compiled_prefix.h"

namespace penstock {

using api::BoundaryLayout;
using api::Refusal;
using api::ScriptCut;
using capture::ScriptCall;
using capture::ScriptPart;
using Setting = api::ScriptSetting;
using api::value_or_refuse;

namespace {

// Limits on the plans of one module (for its modes and different arguments), including refusals, and on verified
// settings.
constexpr size_t kPlansMax = 8;
constexpr size_t kSettingsMax = 64;
// If batches leave out leaves, a comparison waits up to this multiple of verify_every for a batch that arrives whole.
constexpr size_t kPatience = 4;

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta() && !tensor.requires_grad();
}

// For each tensor of the call, its leaf number in the batch; none for other tensors. Returns no value if the program
// has written to a tensor of the batch, since the workers have not seen the write.
std::optional<std::vector<std::optional<uint32_t>>> indices_of(const std::vector<at::Tensor>& tensors,
                                                               const BatchOrigin& origin) {
  std::vector<std::optional<uint32_t>> indices;
  for (const at::Tensor& tensor : tensors) {
    const auto leaf = is_plain(tensor) ? origin.leaf_of(tensor) : std::nullopt;
    if (leaf && !origin.leaves()[*leaf].is_unchanged()) return std::nullopt;
    indices.push_back(leaf);
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

// Formats the list of batches that were used without a comparison.
std::string format_batches(std::vector<int64_t> batches) {
  if (batches.empty()) return "No batch was used without a comparison since the last correct one";
  std::sort(batches.begin(), batches.end());
  std::string text = "Used without a comparison since the last correct one: batch ";
  for (size_t first = 0, end = 0; first < batches.size(); first = end) {
    for (end = first + 1; end < batches.size() && batches[end] <= batches[end - 1] + 1;) ++end;
    if (first > 0) text += ", ";
    text += std::to_string(batches[first]);
    if (batches[end - 1] != batches[first]) text += " to " + std::to_string(batches[end - 1]);
  }
  return text;
}

Plan::Group to_plan_group(const graph::PlanGroup& group) {
  return {.label = group.label, .reason = group.reason, .worker_s = group.worker_s, .trainer_s = group.trainer_s};
}

std::shared_ptr<graph::PricedCut> priced(const ScriptCut& cut, std::shared_ptr<graph::GraphPricing> pricing) {
  return std::make_shared<graph::PricedCut>(
      graph::PricedCut{.plans = cut.plans, .pricing = std::move(pricing), .has_suffix = cut.suffix.has_value()});
}

// Makes TorchScript keep differentiable groups with few operators; a process-wide switch that is off by default.
class SmallGroups {
 public:
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
    : module_(std::move(module)), workers_(workers), options_(options), owner_pid_(::getpid()) {
  if (options_.verify_every < 1) {
    throw Error(ErrorKind::kValue, "verify_every is " + std::to_string(options_.verify_every) + ", but must be >= 1");
  }
  workers->note_origins();
  if (auto* const withholding = workers->withholding())
    withholding->take(reinterpret_cast<uintptr_t>(this), static_cast<uint64_t>(options_.verify_every));
  if (options_.cut == OffloadOptions::Cut::kAuto) pricing_.emplace(workers->measure_steps());
  if (workers->is_parallel()) return;
  refuse("the loader must have workers, got num_workers=0");
  is_open_ = false;
}

OffloadedModule::Impl::~Impl() {
  if (owner_pid_ != ::getpid()) return;  // in a forked child, locks may be held by threads that do not exist there
  const auto workers = workers_.lock();
  if (!workers) return;
  try {
    workers->set_prefixes(this, {});
    if (auto* const withholding = workers->withholding())
      workers->obey(withholding->forget(reinterpret_cast<uintptr_t>(this)));
  } catch (const std::exception&) {
    // Out of memory: the workers keep computing unused results.
  }
}

// ---- Calls

OffloadedModule::Impl::Call::Call(const c10::FunctionSchema& its_schema, const Batch& its_batch)
    : schema(its_schema),
      batch(its_batch),
      origin(BatchAccess::origin_of(its_batch)),
      values{.arguments = api::arguments_of(its_schema, BatchAccess::value_of(its_batch))} {}

void OffloadedModule::Impl::Call::complete(bool is_check) {
  if (is_whole()) return;
  std::set<uint32_t> read;
  if (!is_check)
    for (const at::Tensor& tensor : values.tensors())
      if (const auto leaf = origin->leaf_of(tensor)) read.insert(*leaf);
  origin->complete(read);
  values.arguments = api::arguments_of(schema, BatchAccess::value_of(batch));
}

c10::IValue OffloadedModule::Impl::forward(const Batch& batch) {
  const auto method = module_.get_method("forward");
  Call call(method.function().getSchema(), batch);
  was_called_ = true;
  std::optional<std::vector<at::Tensor>> boundary;
  ScriptCut* cut = nullptr;
  if (is_open_ && call.origin != nullptr && has_plain_surroundings()) {
    cut = repriced(find(call), call);
    last_ = cut;
    if (cut != nullptr) boundary = try_boundary_of(*cut, call);
    if (last_ != cut) cut = nullptr;  // it was given up
  }
  if (call.origin != nullptr) note_call(call, cut);
  if (!boundary) {
    // A cut that is not in use yet will be, so this fetch counts as a check and not as reads.
    call.complete(/*is_check=*/cut != nullptr && cut->message != nullptr);
    return module_.forward(std::move(call.values.arguments));
  }
  ++used_count_;
  const auto suffix = [&] { return cut->suffix->run(&module_, call.values, *boundary); };
  if (!pricing_ || !call.is_whole()) return suffix();
  return pricing_->run(
      cut->priced, [&] { return module_.forward(call.values.arguments); }, suffix);
}

void OffloadedModule::Impl::note_call(const Call& call, const ScriptCut* cut) {
  const auto workers = workers_.lock();
  auto* const withholding = workers ? workers->withholding() : nullptr;
  // In a thread other than the loader's, leaves could not be fetched.
  if (withholding == nullptr || !call.origin->is_owner()) return;
  std::optional<pool_client::LeafWithholding::SeenBatch> seen;
  std::vector<pool_client::LeafWithholding::UsedCut> cuts;
  if (!withholding->is_withholding()) {
    seen = {.leaf_bytes = {}, .read_leaves = call.origin->reads()->seen(), .is_watched = true};
    for (const auto& leaf : call.origin->leaves()) seen->leaf_bytes.push_back(leaf.tensor.nbytes());
    if (reads_before_) seen->read_leaves.merge(reads_before_->seen());
    auto& used = cuts.emplace_back();  // without keys if the whole module runs
    if (cut != nullptr && cut->message != nullptr) {
      const auto& raw_leaves = cut->plan().raw_leaves;
      used.raw_leaves = {raw_leaves.begin(), raw_leaves.end()};
      used.keys = {cut->keys.begin(), cut->keys.end()};
      const bool is_timed = cut->priced && cut->priced->pricing->wants_timed_calls();
      used.is_settled = cut->used_count > 0 && !is_timed;
    }
  }
  reads_before_ = call.origin->reads();
  workers->obey(withholding->note_call(reinterpret_cast<uintptr_t>(this), seen, std::move(cuts)));
}

ScriptCut* OffloadedModule::Impl::repriced(ScriptCut* cut, Call& call) {
  const auto workers = workers_.lock();
  if (cut == nullptr || !pricing_ || !workers) return cut;
  const auto change = pricing_->look_at(cut->priced, workers->is_elsewhere());
  if (!change) return cut;
  pricing_->note_atypical_step();
  call.complete(/*is_check=*/true);
  const auto place = std::find_if(cuts_.begin(), cuts_.end(), [&](const auto& one) { return one.get() == cut; });
  std::unique_ptr<ScriptCut> other;
  if (change->goes_back) {
    other = std::move(left_);
  } else {
    try {
      other = std::make_unique<ScriptCut>(
          api::plan_again(*cut, module_, call.values, call.origin->tensors(), *change->prices));
      other->priced = priced(*other, cut->priced->pricing);
    } catch (const Refusal&) {
    } catch (const std::exception&) {
      // As in find(): the current plan stays.
    }
  }
  if (!other) {
    pricing_->give_up(cut->priced);
    return cut;
  }
  std::swap(*place, other);
  left_ = std::move(other);
  install();
  pricing_->changed(left_->priced, (*place)->priced);
  return place->get();
}

bool OffloadedModule::Impl::has_plain_surroundings() {
  const auto odd = api::odd_surroundings();
  if (odd) note(*odd);
  return !odd;
}

ScriptCut* OffloadedModule::Impl::find(Call& call) {
  auto leaf_indices = indices_of(call.values.tensors(), *call.origin);
  if (!leaf_indices) {
    note("the program writes to a tensor of the batch before the module is called");
    return nullptr;
  }
  for (const auto& cut : cuts_) {
    if (cut->leaf_indices == *leaf_indices && cut->program->holds() && call.values.is_like(cut->call)) return cut.get();
  }
  if (cuts_.size() + refusal_count_ >= kPlansMax) return nullptr;
  call.complete(/*is_check=*/true);
  try {
    cuts_.push_back(std::make_unique<ScriptCut>(api::plan_script(
        module_, call.values, std::move(*leaf_indices), call.origin->tensors(), prices(), mode_of(options_.cut))));
  } catch (const Refusal& refusal) {
    refuse(refusal.reason);
    return nullptr;
  } catch (const std::exception& error) {
    // Planning is not part of training: no failure in it may end the program's run.
    refuse(std::string("planning failed: ") + error.what());
    return nullptr;
  }
  if (pricing_) {
    const auto accelerators = cuts_.back()->accelerators();
    pricing_->set_device(accelerators.empty() ? std::nullopt : std::optional(accelerators.front()));
    cuts_.back()->priced = priced(*cuts_.back(), std::make_shared<graph::GraphPricing>());
    pricing_->note_atypical_step();
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
                            {.bytes_per_s = link->bytes_per_s > 0 ? link->bytes_per_s : graph::kUnknownLinkBytesPerS,
                             .sends_whole = workers->withholding() == nullptr});
}

void OffloadedModule::Impl::install() {
  const auto workers = workers_.lock();
  if (!workers) return;
  std::vector<api::WorkerSet::Message> messages;
  for (const auto& cut : cuts_)
    if (cut->message) messages.push_back(cut->message);
  workers->set_prefixes(this, std::move(messages));
  if (auto* const withholding = workers->withholding()) workers->obey(withholding->send_whole());
}

// ---- Verification

// A comparison may fail, for lack of device memory for example, and is not part of training.
std::optional<std::vector<at::Tensor>> OffloadedModule::Impl::try_boundary_of(ScriptCut& cut, Call& call) {
  try {
    return boundary_of(cut, call);
  } catch (const Error&) {
    throw;  // the batch cannot be fetched
  } catch (const Refusal& refusal) {
    give_up(refusal.reason);
  } catch (const std::exception& error) {
    give_up(std::string("the comparison failed: ") + error.what());
  }
  return std::nullopt;
}

std::optional<std::vector<at::Tensor>> OffloadedModule::Impl::boundary_of(ScriptCut& cut, Call& call) {
  if (!cut.message) return std::nullopt;
  if (cut.has_moved()) {
    forget(cut);
    return std::nullopt;
  }
  if (cut.has_changed()) {
    if (++constant_changes_ > 1)
      give_up("a buffer that is copied to the workers keeps changing");
    else
      forget(cut);
    return std::nullopt;
  }
  const int64_t batch_number = call.batch.number();
  std::vector<at::Tensor> boundary;
  for (size_t index = 0; index < cut.keys.size(); ++index) {
    at::Tensor tensor = call.origin->find(cut.keys[index]);
    if (!tensor.defined()) break;
    boundary.push_back(std::move(tensor));
  }
  Setting setting{.sizes = {}, .thread_count = at::get_num_threads(), .mode = api::ScriptMode::now()};
  int& run_count = cut.runs[setting.mode];
  if (run_count < api::kSettledRuns || boundary.size() < cut.keys.size()) {
    ++run_count;
    return std::nullopt;
  }
  for (const at::Tensor& tensor : call.values.tensors()) setting.sizes.push_back(tensor.sizes().vec());
  if (cut.refused.contains(setting)) return std::nullopt;
  // A loader with a device has already copied them.
  for (size_t index = 0; index < boundary.size(); ++index)
    boundary[index] = boundary[index].to(cut.devices[index].value_or(at::kCPU));
  // The workers may leave out leaves that this cut reads, if another cut, used before, did not need them.
  const auto& raw_leaves = cut.plan().raw_leaves;
  const bool reads_missing = std::any_of(raw_leaves.begin(), raw_leaves.end(),
                                         [&](uint32_t leaf) { return call.origin->missing().contains(leaf); });
  if (reads_missing) call.complete(/*is_check=*/false);
  // If batches leave out leaves, one in verify_every still arrives whole and is worth waiting for.
  const auto verify_every = static_cast<size_t>(options_.verify_every) * (call.is_whole() ? 1 : kPatience);
  const auto settled = cut.settled.find(setting);
  if (settled == cut.settled.end() || cut.unchecked.size() + 1 >= verify_every) {
    call.complete(/*is_check=*/true);
    if (pricing_) pricing_->note_atypical_step();
    if (!is_right(cut, call.values, boundary, setting, batch_number)) return std::nullopt;
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
    give_up("the workers' result of " + cut.operators[index] + " differs from the trainer's result in batch " +
            std::to_string(batch_number) + ". " + format_batches(cut.unchecked));
    return false;
  }
  if (cut.settled.contains(setting)) return true;
  const ScriptPart whole = capture::whole_program(module_);
  const std::vector<c10::Device> devices = cut.accelerators();
  api::settle(module_, call, {.part = whole}, devices);
  std::optional<std::string> difference = "kernels";
  for (const bool keeps_small_groups : {false, true}) {
    const bool is_optimized = !whole.optimized_operators().empty();
    if (keeps_small_groups && !is_optimized) break;
    const SmallGroups small_groups(keeps_small_groups);
    ScriptPart suffix = value_or_refuse(cut.program->suffix(cut.plan(), is_optimized));
    api::settle(module_, call, {.part = suffix, .more = boundary}, devices);
    // One batch does not show every rounding: the optimized program must be the same, too.
    if (!cut.program->is_optimized_alike(cut.plan(), whole, suffix)) continue;
    cut.suffix = std::move(suffix);
    difference =
        api::first_difference(module_, call, {.part = whole}, {.part = *cut.suffix, .more = boundary}, devices);
    break;
  }
  if (!difference) return true;
  cut.refused.insert(setting);
  refuse("the model run by TorchScript without the moved calls has other " + *difference);
  return false;
}

// ---- Reports to the program

void OffloadedModule::Impl::refuse(const std::string& reason) {
  ++refusal_count_;
  note(reason);
}

void OffloadedModule::Impl::note(const std::string& reason) {
  if (std::find(refusals_.begin(), refusals_.end(), reason) != refusals_.end()) return;
  refusals_.push_back(reason);
  if (refusals_.size() == 1) {
    TORCH_WARN("penstock: the whole module runs in the trainer: ", reason);
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
    plan.refused.push_back("the module has not been called yet; its first call creates the plan");
  if (last_ == nullptr) return plan;
  for (const graph::PlanGroup& group : last_->plan().moved) plan.moved.push_back(to_plan_group(group));
  for (const graph::PlanGroup& group : last_->plan().kept) plan.kept.push_back(to_plan_group(group));
  plan.raw_bytes = last_->plan().raw_bytes;
  plan.boundary_bytes = last_->plan().boundary_bytes;
  return plan;
}

// ---- Public interface

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

std::string Plan::explain() const {
  std::string text;
  const auto add = [&](const char* where, const Group& group) {
    char times[64] = "";
    if (group.worker_s > 0 || group.trainer_s > 0)
      std::snprintf(times, sizeof times, ", %.2f ms a batch", 1e3 * std::max(group.worker_s, group.trainer_s));
    text += std::string(where) + group.label + times + ": " + group.reason + "\n";
  };
  for (const Group& group : moved) add("worker   ", group);
  for (const Group& group : kept) add("trainer  ", group);
  for (const std::string& reason : refused) text += "refused  " + reason + "\n";
  return text;
}

}  // namespace penstock
