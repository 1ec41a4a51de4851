// SPDX-License-Identifier: Apache-2.0
#include "worker/stack.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <type_traits>
#include <vector>

#include "base/assert.h"
#include "dataset/row_copy.h"
#include "worker/sample_rows.h"

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

}  // namespace penstock::worker
