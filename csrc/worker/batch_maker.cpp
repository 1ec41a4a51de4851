// SPDX-License-Identifier: Apache-2.0
#include "worker/batch_maker.h"

#include <ATen/MapAllocator.h>
#include <sys/stat.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "wire/nest.h"

namespace penstock::worker {
namespace {

// The time to examine the values, write them and read them again, per byte of the tensor: measured with 64-bit integers
// that become 8 bits wide (bench/micro, BM_Narrow*), with a margin for a busier machine.
constexpr double kSecondsPerByte = 2e-9;
// After this many consecutive misses, a tensor is examined only once in kSkippedMax batches.
constexpr uint32_t kMissesMax = 4;
constexpr uint32_t kSkippedMax = 64;

}  // namespace

bool is_narrow_worthwhile(uint64_t plain_bytes, uint64_t narrow_bytes, double link_bytes_per_s) {
  if (link_bytes_per_s <= 0 || narrow_bytes >= plain_bytes) return false;
  const double saved_s = static_cast<double>(plain_bytes - narrow_bytes) / link_bytes_per_s;
  return saved_s > static_cast<double>(plain_bytes) * kSecondsPerByte;
}

std::vector<std::optional<wire::NarrowForm>> Narrowing::forms_of(const BatchContent& content, double link_bytes_per_s) {
  // If even the smallest possible form would not pay off, no tensor is examined.
  if (!is_narrow_worthwhile(wire::kWidenFactorMax, 1, link_bytes_per_s)) return {};
  std::vector<std::optional<wire::NarrowForm>> forms(content.tensors.size());
  bool is_any = false;
  for (size_t index = 0; index < content.tensors.size(); ++index) {
    const at::Tensor& tensor = content.tensors[index];
    if (std::binary_search(content.withheld.begin(), content.withheld.end(), index)) continue;
    const wire::TensorEntry entry = describe_tensor(tensor);
    if (entry.bytes < wire::kNarrowBytesMin) continue;
    Memory& memory = by_tensor_[index];
    if (memory.misses >= kMissesMax && ++memory.skipped < kSkippedMax) continue;
    memory.skipped = 0;
    const std::span bytes(static_cast<const std::byte*>(tensor.const_data_ptr()), entry.bytes);
    const auto form = wire::narrowest_form(entry, bytes);
    if (!form || !is_narrow_worthwhile(entry.bytes, form->bytes, link_bytes_per_s)) {
      ++memory.misses;
      continue;
    }
    memory.misses = 0;
    forms[index] = form;
    is_any = true;
  }
  if (!is_any) forms.clear();
  return forms;
}

namespace {

bool has_all(const std::vector<std::string>& keys, const std::vector<std::string>& wanted) {
  return std::all_of(wanted.begin(), wanted.end(),
                     [&](const std::string& key) { return std::find(keys.begin(), keys.end(), key) != keys.end(); });
}

}  // namespace

std::vector<uint32_t> leaves_to_withhold(const wire::Shipment& shipment, const BatchContent& content, uint64_t number) {
  if (shipment.whole_every > 0 && number % shipment.whole_every == 0) return {};
  const bool is_complete =
      std::any_of(shipment.boundary_keys.begin(), shipment.boundary_keys.end(),
                  [&](const std::vector<std::string>& keys) { return has_all(content.boundary_keys, keys); });
  if (!is_complete) return {};
  const auto fixed = wire::fixed_leaves(content.nest);
  if (!fixed) return {};
  const size_t leaf_count = content.tensors.size() - content.boundary_keys.size();
  std::set<uint32_t> withheld;
  for (const uint32_t leaf : shipment.withheld) {
    if (leaf >= leaf_count || fixed->contains(leaf)) continue;
    const auto* storage = content.tensors[leaf].storage().unsafeGetStorageImpl();
    const auto shares = [&](const at::Tensor& other) { return other.storage().unsafeGetStorageImpl() == storage; };
    const auto leaves_end = content.tensors.begin() + static_cast<ptrdiff_t>(leaf_count);
    if (std::count_if(content.tensors.begin(), leaves_end, shares) == 1) withheld.insert(leaf);
  }
  return {withheld.begin(), withheld.end()};
}

namespace {

// Null for other memory, and for a mapping whose descriptor torch has not kept.
const at::MapAllocator* shared_file_of(const c10::Storage& storage) {
  const at::MapAllocator* const file = at::MapAllocator::fromDataPtr(storage.data_ptr());
  if (file == nullptr || file->fd() < 0 || file->data() != storage.data()) return nullptr;
  return (file->flags() & at::ALLOCATOR_MAPPED_SHAREDMEM) != 0 ? file : nullptr;
}

// The trainer maps the whole file.
bool is_whole_file(const c10::Storage& storage, const at::MapAllocator& file) {
  struct stat status {};
  return ::fstat(file.fd(), &status) == 0 && static_cast<uint64_t>(status.st_size) == storage.nbytes();
}

}  // namespace

SharedLeaves leaves_to_share(const BatchContent& content) {
  const size_t leaf_count = content.tensors.size() - content.boundary_keys.size();
  // A storage's index among the shared ones, once it has been added to the table.
  std::unordered_map<const c10::StorageImpl*, std::optional<uint32_t>> places;
  for (size_t leaf = 0; leaf < leaf_count && places.size() < wire::kSharedFileCountMax; ++leaf) {
    const at::Tensor& tensor = content.tensors[leaf];
    const at::MapAllocator* const file = shared_file_of(tensor.storage());
    if (file == nullptr || describe_tensor(tensor).bytes < kSharedBytesMin) continue;
    if (is_whole_file(tensor.storage(), *file)) places.try_emplace(tensor.storage().unsafeGetStorageImpl());
  }
  SharedLeaves shared;
  if (places.empty()) return shared;
  shared.storage_of_leaf.resize(leaf_count);
  for (size_t leaf = 0; leaf < leaf_count; ++leaf) {
    const at::Tensor& tensor = content.tensors[leaf];
    const auto found = places.find(tensor.storage().unsafeGetStorageImpl());
    if (found == places.end() || tensor.numel() == 0) continue;
    if (!found->second) {
      found->second = static_cast<uint32_t>(shared.storages.size());
      shared.storages.push_back(tensor.storage());
    }
    shared.storage_of_leaf[leaf] = found->second;
  }
  return shared;
}

Result<MadeBatch> BatchMaker::make(BatchContent& content, const BatchPlace& place) {
  const auto began_at = std::chrono::steady_clock::now();
  const bool is_compiled = prefixes_.run(content, place.epoch_seed, place.sequence);
  if (place.shipment != nullptr) content.withheld = leaves_to_withhold(*place.shipment, content, place.sequence);
  if (place.link_bytes_per_s > 0) content.forms = narrowing_.forms_of(content, place.link_bytes_per_s);
  if (shares_leaves_) content.shared = leaves_to_share(content);
  auto made = make_plain(content);
  if (!made) return made;
  made.value().is_compiled = is_compiled;
  // A fetched batch is usually in the slab already, so sealing copies only the boundary tensors.
  if (!content.boundary_keys.empty()) made.value().on_prefix = std::chrono::steady_clock::now() - began_at;
  return made;
}

Result<MadeBatch> BatchMaker::make_plain(const BatchContent& content) {
  auto sealed = writer_.seal(content);
  if (!sealed) return sealed.error();
  return MadeBatch{.sealed = std::move(sealed).value()};
}

}  // namespace penstock::worker
