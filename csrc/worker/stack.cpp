// SPDX-License-Identifier: Apache-2.0
#include "worker/stack.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <cstring>
#include <type_traits>
#include <vector>

#include "base/result.h"
#include "dataset/collator.h"

namespace penstock::worker {
namespace {

// A tensor of [count, *sizes] in the slab, or on the heap if the slab has no space for it.
at::Tensor empty_batch(SlabWriter& writer, size_t count, at::IntArrayRef sizes, at::ScalarType dtype) {
  std::vector<int64_t> shape{static_cast<int64_t>(count)};
  shape.insert(shape.end(), sizes.begin(), sizes.end());
  at::Tensor batch = writer.empty(shape, dtype);
  return batch.defined() ? batch : at::empty(shape, at::TensorOptions().dtype(dtype));
}

template <typename T>
void write_numbers(std::span<const Number> numbers, at::Tensor& column) {
  T* target = column.mutable_data_ptr<T>();
  for (const Number& number : numbers) {
    if constexpr (std::is_floating_point_v<T>) {
      *target++ = static_cast<T>(number.floating);
    } else {
      *target++ = static_cast<T>(number.integer);
    }
  }
}

}  // namespace

at::Tensor stack_samples(SlabWriter& writer, std::span<const at::Tensor> samples) {
  if (samples.empty() || !is_plain_tensor(samples.front())) return {};
  const at::Tensor& first = samples.front();
  for (const at::Tensor& sample : samples.subspan(1)) {
    if (!is_plain_tensor(sample) || sample.scalar_type() != first.scalar_type() || sample.sizes() != first.sizes()) {
      return {};
    }
  }
  if (auto batch = batch_of_rows(writer, samples); batch.defined()) return batch;
  at::Tensor batch = empty_batch(writer, samples.size(), first.sizes(), first.scalar_type());
  if (batch.numel() == 0) return batch;
  for (size_t index = 0; index < samples.size(); ++index) dataset::copy_row(batch, index, samples[index]);
  return batch;
}

at::Tensor stack_numbers(SlabWriter& writer, std::span<const Number> numbers, at::ScalarType dtype) {
  at::Tensor column = empty_batch(writer, numbers.size(), {}, dtype);
  switch (dtype) {
    case at::kDouble: write_numbers<double>(numbers, column); break;
    case at::kFloat: write_numbers<float>(numbers, column); break;
    case at::kLong: write_numbers<int64_t>(numbers, column); break;
    case at::kInt: write_numbers<int32_t>(numbers, column); break;
    case at::kShort: write_numbers<int16_t>(numbers, column); break;
    case at::kChar: write_numbers<int8_t>(numbers, column); break;
    case at::kByte: write_numbers<uint8_t>(numbers, column); break;
    case at::kBool: write_numbers<bool>(numbers, column); break;
    default: PENSTOCK_ASSERT(false, "no column of numbers has the dtype ", c10::toString(dtype));
  }
  return column;
}

at::Tensor stack_rows(SlabWriter& writer, std::span<const void* const> rows, at::IntArrayRef sizes,
                      at::ScalarType dtype) {
  at::Tensor batch = empty_batch(writer, rows.size(), sizes, dtype);
  if (batch.numel() == 0) return batch;
  const auto row_bytes = static_cast<size_t>(batch.numel()) / rows.size() * batch.element_size();
  const auto copy = dataset::copy_of_rows(rows.size(), row_bytes);
  auto* target = static_cast<std::byte*>(batch.mutable_data_ptr());
  for (const void* row : rows) {
    copy(target, row, row_bytes);
    target += row_bytes;
  }
  return batch;
}

at::Tensor gather_rows(SlabWriter& writer, const at::Tensor& source, std::span<const int64_t> indices) {
  if (!is_plain_tensor(source) || source.dim() == 0 || indices.empty()) return {};
  const int64_t row_count = source.size(0);
  for (int64_t index : indices) {
    if (index < 0 || index >= row_count) return {};
  }
  at::Tensor batch = empty_batch(writer, indices.size(), source.sizes().slice(1), source.scalar_type());
  if (batch.numel() == 0) return batch;
  const auto row_bytes = static_cast<size_t>(batch.numel()) / indices.size() * source.element_size();
  auto* target = static_cast<std::byte*>(batch.mutable_data_ptr());
  if (source.is_contiguous()) {
    const auto copy = dataset::copy_of_rows(indices.size(), row_bytes);
    const auto* rows = static_cast<const std::byte*>(source.const_data_ptr());
    for (int64_t index : indices) {
      copy(target, rows + static_cast<size_t>(index) * row_bytes, row_bytes);
      target += row_bytes;
    }
    return batch;
  }
  for (size_t place = 0; place < indices.size(); ++place) {
    batch.select(0, static_cast<int64_t>(place)).copy_(source.select(0, indices[place]));
  }
  return batch;
}

std::optional<RowBatch> gather_batch(SlabWriter& writer, std::span<const at::Tensor> sources,
                                     std::span<const int64_t> indices) {
  RowBatch batch;
  batch.nest.list(static_cast<uint32_t>(sources.size()));
  writer.begin();
  for (const at::Tensor& source : sources) {
    batch.nest.tensor(static_cast<uint32_t>(batch.tensors.size()));
    batch.tensors.push_back(gather_rows(writer, source, indices));
    if (!batch.tensors.back().defined()) return std::nullopt;
  }
  return batch;
}

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
