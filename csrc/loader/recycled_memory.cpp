// SPDX-License-Identifier: Apache-2.0
#include "loader/recycled_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <utility>

namespace penstock::loader {
namespace {

// Smaller blocks are allocated from the heap, which has them readily available.
constexpr uint64_t kRecycledBytesMin = 64 << 10;

}  // namespace

// A block in use by a tensor.
struct RecycledMemory::Loan {
  std::shared_ptr<Blocks> blocks;
  at::DataPtr block;
  uint64_t bytes;
};

at::DataPtr RecycledMemory::Blocks::try_take(uint64_t bytes) {
  MutexLock lock(mutex_);
  const auto found = free_.find(bytes);
  if (found == free_.end() || found->second.empty()) return {};
  at::DataPtr block = std::move(found->second.back());
  found->second.pop_back();
  kept_bytes_ -= bytes;
  return block;
}

void RecycledMemory::Blocks::give_back(at::DataPtr block, uint64_t bytes) {
  std::map<uint64_t, std::vector<at::DataPtr>> dropped;  // freed without the lock
  MutexLock lock(mutex_);
  if (bytes > kept_bytes_max_) return;
  // Drops all blocks, so that blocks of sizes that are no longer requested do not stay.
  if (kept_bytes_ + bytes > kept_bytes_max_) {
    dropped = std::exchange(free_, {});
    kept_bytes_ = 0;
  }
  free_[bytes].push_back(std::move(block));
  kept_bytes_ += bytes;
}

void RecycledMemory::Blocks::close() {
  std::map<uint64_t, std::vector<at::DataPtr>> dropped;
  MutexLock lock(mutex_);
  kept_bytes_max_ = kept_bytes_ = 0;
  dropped = std::exchange(free_, {});
}

uint64_t RecycledMemory::Blocks::kept_bytes() const {
  MutexLock lock(mutex_);
  return kept_bytes_;
}

void RecycledMemory::end_loan(void* loan) {
  const std::unique_ptr<Loan> ended(static_cast<Loan*>(loan));
  ended->blocks->give_back(std::move(ended->block), ended->bytes);
}

at::Tensor RecycledMemory::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  const uint64_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  if (bytes < kRecycledBytesMin) return at::empty(sizes, at::TensorOptions().dtype(dtype));
  at::DataPtr block = blocks_->try_take(bytes);
  if (!block) block = c10::GetCPUAllocator()->allocate(bytes);
  void* const data = block.get();
  auto loan = std::make_unique<Loan>(Loan{.blocks = blocks_, .block = std::move(block), .bytes = bytes});
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       at::DataPtr(data, loan.release(), &end_loan, at::kCPU),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         caffe2::TypeMeta::fromScalarType(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace penstock::loader
