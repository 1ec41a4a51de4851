// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tensor in shared memory, as share_memory_() makes it.

#include <ATen/MapAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace penstock::worker {

// `element_count` float32 that count up from 0.
inline at::Tensor in_shared_memory(int64_t element_count) {
  const auto bytes = static_cast<size_t>(element_count) * sizeof(float);
  const int fd = ::memfd_create("shared_tensor", MFD_CLOEXEC);
  const bool is_sized = fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0;
  TORCH_CHECK(is_sized, "no memory for a test");
  constexpr int kFlags = at::ALLOCATOR_MAPPED_SHAREDMEM | at::ALLOCATOR_MAPPED_NOCREATE | at::ALLOCATOR_MAPPED_KEEPFD |
                         at::ALLOCATOR_MAPPED_FROMFD;
  const c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      at::MapAllocator::makeDataPtr(at::WITH_FD, "", fd, kFlags, bytes, nullptr), nullptr, false));
  at::Tensor tensor = at::empty({0}, at::kFloat).set_(storage, 0, {element_count});
  return tensor.copy_(at::arange(element_count));
}

inline int file_of(const at::Tensor& tensor) {
  return at::MapAllocator::fromDataPtr(tensor.storage().data_ptr())->fd();
}

}  // namespace penstock::worker
