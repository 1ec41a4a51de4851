// SPDX-License-Identifier: Apache-2.0
#include "api/script_offload.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "api/batch_boundary.h"
#include "api/data_loader_impl.h"
#include "api/module_call.h"
#include "api/script_comparison.h"
#include "graph/effects.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "loader/client.h"
#include "penstock/error.h"
#include "runtime/calibrate.h"
#include "runtime/executor.h"
#include "runtime/same_bits.h"
#include "worker/prefix_message.h"

namespace penstock {

using capture::ScriptCall;
using capture::ScriptPart;
using capture::ScriptProgram;

namespace {

// How many plans one module may have (its modes, other arguments), and how many refusals.
constexpr size_t kPlansMax = 8;
// TorchScript optimizes a program in its first runs; from this one on it stays as it is.
constexpr int kSettledRuns = 4;
constexpr size_t kSettingsMax = 64;
constexpr int64_t kSmallBytesMax = 16 << 10;
// Libraries of operators that only compute.
const std::set<std::string, std::less<>> kKnownLibraries = {"aten",        "size",        "list",    "opaque",
                                                            "opaque_view", "torchscript", "declared"};

// A program that cannot be cut, and why.
struct Refusal {
  std::string reason;
};

template <typename T>
T value_or_refuse(Result<T> result) {
  if (!result) throw Refusal{result.error().message};
  return std::move(result).value();
}

void collect_leaves(const Value& value, std::vector<at::Tensor>& leaves) {
  if (value.is_tensor()) {
    leaves.push_back(value.tensor());
  } else if (value.kind() == Value::Kind::kList || value.kind() == Value::Kind::kTuple) {
    for (const Value& item : value.items()) collect_leaves(item, leaves);
  } else if (value.kind() == Value::Kind::kDict) {
    for (const Value::Entry& entry : value.entries()) collect_leaves(entry.value, leaves);
  }
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() && !tensor.requires_grad();
}

// For each tensor of the call its number in the batch; none for one from elsewhere.
std::vector<std::optional<uint32_t>> indices_of(const std::vector<at::Tensor>& tensors,
                                                const std::vector<at::Tensor>& leaves) {
  std::vector<std::optional<uint32_t>> indices;
  for (const at::Tensor& tensor : tensors) {
    const auto found =
        std::find_if(leaves.begin(), leaves.end(), [&](const at::Tensor& leaf) { return leaf.is_same(tensor); });
    if (found != leaves.end() && is_plain(tensor))
      indices.emplace_back(static_cast<uint32_t>(found - leaves.begin()));
    else
      indices.emplace_back(std::nullopt);
  }
  return indices;
}

void refuse_effects(const graph::Graph& graph) {
  for (const graph::Node& node : graph.nodes) {
    const std::string name(node.op);
    const std::string library = name.substr(0, name.find("::"));
    if (!kKnownLibraries.contains(library)) {
      throw Refusal{"the module uses " + name +
                    ", which may do more than compute, so it cannot be run once more to compare"};
    }
  }
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
  Cut* cut = nullptr;
  if (is_open_) {
    std::vector<at::Tensor> leaves;
    collect_leaves(batch.value(), leaves);
    cut = find(call, indices_of(call.tensors(), leaves), leaves);
    if (cut != nullptr) {
      last_ = cut;
      boundary = boundary_of(*cut, call, batch);
    }
  }
  if (!boundary) return module_.forward(std::move(call.arguments));
  ++used_count_;
  return cut->suffix->run(&module_, call, *boundary);
}

OffloadedModule::Impl::Cut* OffloadedModule::Impl::find(const ScriptCall& call,
                                                        const std::vector<std::optional<uint32_t>>& leaf_indices,
                                                        const std::vector<at::Tensor>& leaves) {
  for (const auto& cut : cuts_)
    if (cut->leaf_indices == leaf_indices && cut->program.holds() && call.is_like(cut->call)) return cut.get();
  if (cuts_.size() + refusal_count_ >= kPlansMax) return nullptr;
  try {
    cuts_.push_back(std::make_unique<Cut>(make(call, leaf_indices, leaves)));
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

OffloadedModule::Impl::Cut OffloadedModule::Impl::make(const ScriptCall& call,
                                                       std::vector<std::optional<uint32_t>> leaf_indices,
                                                       const std::vector<at::Tensor>& leaves) {
  const bool has_leaf =
      std::any_of(leaf_indices.begin(), leaf_indices.end(), [](const auto& one) { return one.has_value(); });
  if (!has_leaf) {
    throw Refusal{
        "no tensor of the batch is an argument of the module by itself and on the CPU; TorchScript is read when "
        "it takes tensors and tuples of tensors"};
  }
  auto program = value_or_refuse(ScriptProgram::read(module_, call, leaf_indices));
  const graph::Graph& graph = program.graph();
  refuse_effects(graph);
  const auto verdicts = graph::analyse_effects(graph, {});
  const auto& held = program.constants();
  const auto calibration = value_or_refuse(
      runtime::calibrate(graph, verdicts, leaves, std::vector<std::optional<at::Tensor>>(held.begin(), held.end())));
  using Mode = OffloadOptions::Cut;
  const graph::CutMode mode = options_.cut == Mode::kAuto      ? graph::CutMode::kAuto
                              : options_.cut == Mode::kMaximal ? graph::CutMode::kMaximal
                                                               : graph::CutMode::kNone;
  auto plan = value_or_refuse(graph::make_plan(graph, verdicts, calibration, prices(), mode));
  const graph::Graph prefix = value_or_refuse(graph::extract_prefix(graph, plan));
  Cut cut{
      .leaf_indices = std::move(leaf_indices), .call = call, .program = std::move(program), .plan = std::move(plan)};
  if (prefix.outputs.empty()) return cut;
  const graph::Graph& whole = cut.program.graph();
  for (const auto& output : prefix.outputs) cut.keys.push_back(output.key);
  cut.operators = cut.plan.boundary_names;
  std::vector<at::Tensor> constants;
  for (const graph::Input& wanted : prefix.inputs) {
    if (wanted.kind != graph::InputKind::kConst) continue;
    size_t index = 0;
    for (const graph::Input& input : whole.inputs) {
      if (input.kind == graph::InputKind::kLeaf) continue;
      if (whole.value_names[input.value] == prefix.value_names[wanted.value]) {
        const at::Tensor& constant = cut.program.constants()[index];
        constants.push_back(constant.detach());
        cut.constants.push_back({.index = index,
                                 .copy = constant.detach().clone(),
                                 .address = constant.const_data_ptr(),
                                 .version = constant.unsafeGetTensorImpl()->version_counter().current_version()});
      }
      ++index;
    }
  }
  cut.suffix = value_or_refuse(cut.program.suffix(cut.plan));
  cut.reference = value_or_refuse(cut.program.computing(cut.plan.boundary));
  // Holds the prefix against the calls it came from, on this very batch.
  const auto executor = value_or_refuse(runtime::Executor::create(prefix, constants));
  const auto made = value_or_refuse(executor.run(leaves));
  const at::NoGradGuard no_grad;
  const c10::IValue expected = cut.reference->run(&module_, call, {});
  for (size_t index = 0; index < made.size(); ++index) {
    if (!runtime::is_same_bits(made[index], expected.toTupleRef().elements()[index].toTensor()))
      throw Refusal{cut.operators[index] + " gives other bits in a worker than in the trainer"};
  }
  const auto message = value_or_refuse(
      worker::write_prefix_message({.text = graph::print_graph(prefix), .constants = std::move(constants)}));
  cut.message = std::make_shared<const std::vector<std::byte>>(message);
  return cut;
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

std::optional<std::vector<at::Tensor>> OffloadedModule::Impl::boundary_of(Cut& cut, const ScriptCall& call,
                                                                          const Batch& batch) {
  if (!cut.message) return std::nullopt;
  if (has_changed(cut)) {
    if (++constant_changes_ > 1) {
      give_up("a buffer that workers have a copy of keeps changing");
    } else {
      std::erase_if(cuts_, [&](const auto& one) { return one.get() == &cut; });
      last_ = nullptr;
      install();
    }
    return std::nullopt;
  }
  const bool has_gradients = at::GradMode::is_enabled();
  const BatchBoundary* made = BatchAccess::boundary_of(batch);
  std::vector<at::Tensor> boundary;
  for (const std::string& key : cut.keys) {
    at::Tensor tensor = made == nullptr ? at::Tensor() : made->find(key);
    if (!tensor.defined()) break;
    boundary.push_back(std::move(tensor));
  }
  int& run_count = cut.runs[has_gradients];
  if (run_count < kSettledRuns || boundary.size() < cut.keys.size()) {
    ++run_count;
    return std::nullopt;
  }
  Setting setting{.thread_count = at::get_num_threads(), .has_gradients = has_gradients};
  for (const at::Tensor& tensor : call.tensors()) setting.sizes.push_back(tensor.sizes().vec());
  if (cut.refused.contains(setting)) return std::nullopt;
  const bool is_due = cut.used_count % static_cast<uint64_t>(options_.verify_every) == 0;
  if (is_due || !cut.settled.contains(setting)) {
    if (!is_right(cut, call, boundary, setting, batch.number())) return std::nullopt;
    if (cut.settled.size() >= kSettingsMax) cut.settled.clear();
    cut.settled.insert(setting);
  }
  ++cut.used_count;
  return boundary;
}

bool OffloadedModule::Impl::is_right(Cut& cut, const ScriptCall& call, const std::vector<at::Tensor>& boundary,
                                     const Setting& setting, int64_t batch_number) {
  const c10::IValue expected = [&] {
    const at::NoGradGuard no_grad;
    return cut.reference->run(&module_, call, {});
  }();
  for (size_t index = 0; index < boundary.size(); ++index) {
    if (runtime::is_same_bits(boundary[index], expected.toTupleRef().elements()[index].toTensor())) continue;
    give_up("the workers' result of " + cut.operators[index] + " differs from the trainer's own in batch " +
            std::to_string(batch_number));
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

// A version that stayed is no proof, so small constants are compared each time; of large ones only the comparison of
// whole batches can tell.
bool OffloadedModule::Impl::has_changed(Cut& cut) const {
  for (Constant& constant : cut.constants) {
    const at::Tensor& now = cut.program.constants()[constant.index];
    const uint64_t version = now.unsafeGetTensorImpl()->version_counter().current_version();
    const bool is_marked = now.const_data_ptr() == constant.address && version == constant.version;
    if (is_marked && static_cast<int64_t>(now.nbytes()) > kSmallBytesMax) continue;
    if (!runtime::is_same_bits(now.detach(), constant.copy)) return true;
    constant.address = now.const_data_ptr();
    constant.version = version;
  }
  return false;
}

// ---- What the program is told

void OffloadedModule::Impl::refuse(const std::string& reason) {
  ++refusal_count_;
  if (std::find(refusals_.begin(), refusals_.end(), reason) != refusals_.end()) return;
  refusals_.push_back(reason);
  if (refusals_.size() == 1) TORCH_WARN("penstock: the module runs whole in the trainer: ", reason);
}

void OffloadedModule::Impl::give_up(const std::string& reason) {
  refuse(reason);
  is_open_ = false;
  cuts_.clear();
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
