// SPDX-License-Identifier: Apache-2.0
#include "dataset/row_copy.h"

#include <cstring>

#include "dataset/copy_past_caches.h"

namespace penstock::dataset {
namespace {

// A batch of this size has left a core's private caches before the trainer reads its first byte. Smaller ones are best
// kept there, and rows below a few pages cost more in fences than their stores save.
constexpr size_t kUncachedBatchBytes = 8 << 20;
constexpr size_t kUncachedRowBytes = 16 << 10;

void copy_plainly(void* target, const void* source, size_t bytes) { std::memcpy(target, source, bytes); }

}  // namespace

CopyBytes copy_of_rows(size_t count, size_t row_bytes) {
  const bool is_uncached = row_bytes >= kUncachedRowBytes && count * row_bytes >= kUncachedBatchBytes;
  return is_uncached ? copy_past_caches : copy_plainly;
}

void copy_row(const at::Tensor& batch, size_t place, const at::Tensor& row) {
  if (!row.is_contiguous()) {
    batch.select(0, static_cast<int64_t>(place)).copy_(row);
    return;
  }
  const size_t bytes = row.nbytes();
  if (bytes == 0) return;
  auto* const target = static_cast<std::byte*>(batch.mutable_data_ptr()) + place * bytes;
  copy_of_rows(static_cast<size_t>(batch.size(0)), bytes)(target, row.const_data_ptr(), bytes);
}

}  // namespace penstock::dataset
