// SPDX-License-Identifier: Apache-2.0
#include "worker/sample_rows.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include "dataset/row_copy.h"

namespace penstock::worker {
namespace {

// Whether dropping `tensor` frees its memory, and it is otherwise unreachable. Memory of numpy or of another library
// may have owners that torch does not count.
bool is_held_once(const at::Tensor& tensor) {
  if (!is_plain_tensor(tensor) || tensor.use_count() != 1 || tensor.storage().use_count() != 1) return false;
  return tensor.storage().data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

// Row `place` of `batch`, without torch recording that one is a view of the other.
at::Tensor row_of(const at::Tensor& batch, size_t place) {
  const auto sizes = batch.sizes().slice(1);
  auto row = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(batch.storage()),
                                                      c10::DispatchKeySet(c10::DispatchKey::CPU), batch.dtype());
  row.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  row.unsafeGetTensorImpl()->set_storage_offset(static_cast<int64_t>(place) * c10::multiply_integers(sizes));
  return row;
}

}  // namespace

void SampleRows::begin(size_t sample_count) {
  columns_.clear();
  sample_count_ = sample_count;
  begun_count_ = 0;
  next_column_ = 0;
  has_movable_ = false;
}

bool SampleRows::end() {
  const bool has_movable = has_movable_;
  begin(0);
  return has_movable;
}

void SampleRows::begin_sample() {
  ++begun_count_;
  next_column_ = 0;
}

at::Tensor SampleRows::take(const at::Tensor& tensor) {
  const size_t place = begun_count_ - 1;
  const size_t index = next_column_++;
  if (begun_count_ == 0 || place >= sample_count_) return {};
  const bool is_movable = is_held_once(tensor) && tensor.nbytes() >= kMovedBytesMin;
  has_movable_ = has_movable_ || is_movable;
  if (index == columns_.size()) {
    Column column;
    if (place == 0 && is_movable) {
      std::vector<int64_t> sizes{static_cast<int64_t>(sample_count_)};
      sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
      column.batch = writer_.empty_if_free(sizes, tensor.scalar_type());
    }
    columns_.push_back(std::move(column));
  }
  Column& column = columns_[index];
  if (!column.batch.defined()) return {};
  const bool fits = is_movable && column.moved_count == place && tensor.scalar_type() == column.batch.scalar_type() &&
                    tensor.sizes() == column.batch.sizes().slice(1);
  if (!fits) {  // the column is stacked as a whole, or rejected by torch
    column.batch.reset();
    return {};
  }
  at::Tensor row = row_of(column.batch, place);
  dataset::copy_row(column.batch, place, tensor);
  ++column.moved_count;
  if (column.moved_count == sample_count_) column.batch.reset();
  return row;
}

at::Tensor batch_of_rows(SlabWriter& writer, std::span<const at::Tensor> samples) {
  const at::Tensor& first = samples.front();
  const at::Storage& storage = first.storage();
  const auto count = static_cast<int64_t>(samples.size());
  if (storage.use_count() != samples.size() || storage.nbytes() != first.nbytes() * samples.size() ||
      !writer.holds(storage)) {
    return {};
  }
  for (int64_t place = 0; place < count; ++place) {
    const at::Tensor& sample = samples[static_cast<size_t>(place)];
    const bool is_row = sample.storage().is_alias_of(storage) && sample.scalar_type() == first.scalar_type() &&
                        sample.sizes() == first.sizes() && sample.is_contiguous() &&
                        sample.storage_offset() == place * first.numel();
    if (!is_row) return {};
  }
  std::vector<int64_t> sizes{count};
  sizes.insert(sizes.end(), first.sizes().begin(), first.sizes().end());
  auto batch = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                        c10::DispatchKeySet(c10::DispatchKey::CPU), first.dtype());
  batch.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return batch;
}

}  // namespace penstock::worker
