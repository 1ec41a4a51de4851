// SPDX-License-Identifier: Apache-2.0
#include "api/batch_origin.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "api/commit_ledger.h"
#include "api/exceptions.h"
#include "api/worker_set.h"
#include "dataset/nest_value.h"
#include "penstock/batch.h"
#include "runtime/compiled_prefix.h"

namespace penstock {
namespace {

std::optional<uint32_t> place_in(const std::vector<BatchOrigin::Leaf>& leaves, const at::Tensor& tensor) {
  const auto found = std::ranges::find_if(leaves, [&](const auto& one) { return one.tensor.is_same(tensor); });
  return found == leaves.end() ? std::nullopt : std::optional(static_cast<uint32_t>(found - leaves.begin()));
}

}  // namespace

BatchOrigin::BatchOrigin(const std::vector<at::Tensor>& leaves, std::vector<std::string> keys,
                         const std::vector<at::Tensor>& boundary, std::optional<Withheld> withheld)
    : leaves_(leaves.begin(), leaves.end()),
      keys_(std::move(keys)),
      boundary_(boundary.begin(), boundary.end()),
      withheld_(std::move(withheld)),
      owner_pid_(::getpid()) {}

std::vector<at::Tensor> BatchOrigin::tensors() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(leaves().size());
  for (const Leaf& leaf : leaves()) tensors.push_back(leaf.tensor);
  return tensors;
}

std::optional<uint32_t> BatchOrigin::leaf_of(const at::Tensor& tensor) const { return place_in(leaves(), tensor); }

at::Tensor BatchOrigin::find(const std::string& key) const {
  for (size_t index = 0; index < keys_.size(); ++index)
    if (keys_[index] == key) return boundary_[index].tensor;
  return {};
}

const std::set<uint32_t>& BatchOrigin::missing() const {
  static const std::set<uint32_t> none;
  return withheld_ && !has_come_.load() ? withheld_->leaves : none;
}

bool BatchOrigin::is_owner() const { return owner_ == std::this_thread::get_id() && owner_pid_ == ::getpid(); }

const at::Tensor& BatchOrigin::read(const at::Tensor& came) {
  const auto leaf = place_in(leaves_, came);
  if (!leaf) return came;
  reads_->note(*leaf);
  if (missing().contains(*leaf)) complete({*leaf});
  return leaves()[*leaf].tensor;
}

const Value& BatchOrigin::read_all(const Value& came) {
  for (uint32_t leaf = 0; leaf < leaves_.size(); ++leaf) reads_->note(leaf);
  if (!missing().empty()) complete(missing());
  return now(came);
}

void BatchOrigin::complete(const std::set<uint32_t>& read) {
  if (missing().empty()) return;
  if (!is_owner()) {
    throw Error(ErrorKind::kUnsupported, "a tensor of " + name() +
                                             " was not sent and was read outside the loader's thread or process; read "
                                             "it there first, or offload the module with Cut::kNone");
  }
  const auto workers = withheld_->workers.lock();
  if (!workers) {
    throw Error(ErrorKind::kClosed, "a tensor of " + name() +
                                        " was not sent, and the loader released its workers before the program read "
                                        "it; read it while the loader exists");
  }
  complete(*workers);
  for (const uint32_t leaf : read)
    if (withheld_->leaves.contains(leaf)) workers->note_recall(leaf);
}

void BatchOrigin::complete(api::WorkerSet& workers) {
  if (missing().empty()) return;
  std::unique_ptr<loader::Batch> made;
  try {
    made = workers.recall(withheld_->maker);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kDataset) throw;
    throw Error(error.kind(), "a tensor of " + name() + " was not sent, and no other worker can send it: " +
                                  error.what() + "; read it earlier, or offload the module with Cut::kNone");
  }
  std::vector<at::Tensor> whole = tensors();
  check_same(*made, whole);
  for (const uint32_t leaf : missing()) whole[leaf] = made->tensors().all()[leaf];
  whole_ = dataset::with_tensors(withheld_->came, [&](const at::Tensor& came) {
    for (const uint32_t leaf : withheld_->leaves)
      if (leaves_[leaf].tensor.is_same(came)) return whole[leaf];
    return came;
  });
  for (size_t leaf = 0; leaf < whole.size(); ++leaf)
    whole_leaves_.push_back(withheld_->leaves.contains(static_cast<uint32_t>(leaf)) ? Leaf(whole[leaf])
                                                                                    : leaves_[leaf]);
  has_come_.store(true);
}

// A batch that was made again must equal the original.
void BatchOrigin::check_same(loader::Batch& made, const std::vector<at::Tensor>& tensors) const {
  const size_t leaf_count = made.record().frame().leaf_count();
  bool is_same = leaf_count == tensors.size();
  for (const uint32_t leaf : missing()) {
    if (!is_same) break;
    const at::Tensor now = made.tensors().meta(leaf);
    is_same = now.scalar_type() == tensors[leaf].scalar_type() && now.sizes() == tensors[leaf].sizes();
  }
  const auto& keys = made.record().frame().boundary_keys;
  for (size_t index = 0; is_same && index < keys_.size(); ++index) {
    const auto key = std::find(keys.begin(), keys.end(), keys_[index]);
    if (key == keys.end() || !boundary_[index].is_unchanged()) continue;
    const at::Tensor& now = made.tensors().all()[leaf_count + static_cast<size_t>(key - keys.begin())];
    is_same = runtime::is_same_bits(boundary_[index].tensor.cpu(), now.cpu());
  }
  if (is_same) return;
  throw Error(
      ErrorKind::kDataset,
      "a tensor of " + name() +
          " was not sent, and re-creating the batch when the program read it yielded different values: the dataset "
          "does not return the same sample for the same index and seeds, or a worker with different hardware made it. "
          "Make the dataset deterministic, use workers with the same hardware, or offload the module with "
          "Cut::kNone");
}

namespace {

const at::Tensor& tensor_of(const Value& part, const std::string& name) {
  if (!part.is_tensor()) detail::throw_misfit("batch[" + name + "]", "a tensor", part);
  return part.tensor();
}

}  // namespace

const at::Tensor& Batch::operator[](std::string_view name) const {
  const at::Tensor& came = tensor_of(value_[name], "'" + std::string(name) + "'");
  return origin_ ? origin_->read(came) : came;
}

const at::Tensor& Batch::operator[](size_t position) const {
  const at::Tensor& came = tensor_of(value_[position], std::to_string(position));
  return origin_ ? origin_->read(came) : came;
}

BatchId Batch::id() const {
  if (!mark_) {
    throw Error(ErrorKind::kUnsupported,
                "id() requires a batch of a loader with commit=manual, got a batch of another loader, or of none; set "
                "Options::commit to Commit::kManual");
  }
  return mark_->id;
}

const Value& Batch::read() const { return origin_->read_all(value_); }

}  // namespace penstock
