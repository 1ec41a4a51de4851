// SPDX-License-Identifier: Apache-2.0
#include "worker/sharing.h"

#include <ATen/MapAllocator.h>
#include <sys/stat.h>

#include <unordered_map>

namespace penstock::worker {
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

}  // namespace penstock::worker
