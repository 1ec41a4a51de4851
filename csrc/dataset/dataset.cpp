// SPDX-License-Identifier: Apache-2.0
#include "penstock/dataset.h"

#include <string>

namespace penstock {

Dataset::~Dataset() = default;
std::optional<Value> Dataset::get_batch(std::span<const int64_t>, Draws&) { return std::nullopt; }
std::shared_ptr<Dataset> Dataset::clone() const { return nullptr; }

SampleStream::~SampleStream() = default;
std::optional<Value> SampleStream::state() const { return std::nullopt; }
void SampleStream::load(const Value&) {
  throw Error(
      ErrorKind::kUnsupported,
      "a SampleStream with a state() must have a load(); override both, or neither to have the stream read again");
}

IterableDataset::~IterableDataset() = default;

TensorDataset::TensorDataset(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  if (tensors_.empty()) throw Error(ErrorKind::kValue, "TensorDataset requires at least one tensor, got none");
  for (const at::Tensor& tensor : tensors_) {
    const bool has_rows = tensor.defined() && tensor.layout() == at::kStrided && tensor.dim() > 0 &&
                          tensor.device().is_cpu() && tensor.is_contiguous();
    if (!has_rows) {
      throw Error(
          ErrorKind::kValue,
          "TensorDataset requires contiguous CPU tensors with at least one dimension; call cpu() or contiguous()");
    }
    if (tensor.size(0) != tensors_.front().size(0)) {
      throw Error(ErrorKind::kValue, "Size mismatch between tensors: TensorDataset was given tensors of " +
                                         std::to_string(tensors_.front().size(0)) + " and of " +
                                         std::to_string(tensor.size(0)) + " rows");
    }
  }
}

int64_t TensorDataset::size() const { return tensors_.front().size(0); }

Value TensorDataset::get(int64_t index, Draws&) {
  Value::Items items;
  for (const at::Tensor& tensor : tensors_) items.emplace_back(tensor.select(0, index));
  return Value::tuple(std::move(items));
}

}  // namespace penstock
