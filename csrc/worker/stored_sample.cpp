// SPDX-License-Identifier: Apache-2.0
#include "worker/stored_sample.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/copy_digest.h"
#include "shm/sample_store.h"
#include "wire/nest.h"
#include "worker/slab_writer.h"

namespace penstock::worker {
namespace {

using shm::SampleHead;

// The digest of the head's numbers and of the parts of a sample.
CopyDigest begin_digest(const SampleHead& head, std::span<const std::byte> record) {
  CopyDigest digest;
  digest.add(std::as_bytes(std::span(&head, 1)).subspan(sizeof head.digest));
  digest.add(record);
  return digest;
}

// A tensor whose strides leave holes, without the neighbours' bytes in them.
at::Tensor without_neighbours(const at::Tensor& tensor, uint64_t span_bytes) {
  const auto element_bytes = static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
  if (span_bytes <= element_bytes) return tensor;
  if (span_bytes > 4 * element_bytes) return tensor.contiguous();
  at::Tensor own = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
  std::memset(own.mutable_data_ptr(), 0, span_bytes);
  return own.copy_(tensor);
}

}  // namespace

StorableSample::StorableSample(std::span<const std::byte> nest, std::vector<at::Tensor> tensors)
    : tensors_(std::move(tensors)) {
  wire::Frame frame{.tensors = {}, .boundary_keys = {}, .nest = nest};
  for (at::Tensor& tensor : tensors_) {
    tensor = without_neighbours(tensor, describe_tensor(tensor).bytes);
    wire::TensorEntry entry = describe_tensor(tensor);
    entry.offset = frame.payload_bytes;
    frame.payload_bytes = align_up(entry.offset + entry.bytes, wire::kPayloadAlignment);
    frame.tensors.push_back(std::move(entry));
  }
  record_ = wire::write_frame(frame);
  entries_ = std::move(frame.tensors);
  payload_place_ = align_up(sizeof(SampleHead) + record_.size(), wire::kPayloadAlignment);
  bytes_ = payload_place_ + frame.payload_bytes;
}

std::span<const std::byte> StorableSample::bytes_of(size_t tensor) const {
  return {static_cast<const std::byte*>(tensors_[tensor].const_data_ptr()), entries_[tensor].bytes};
}

void StorableSample::write(const SampleName& name, std::span<std::byte> memory) const {
  PENSTOCK_ASSERT(memory.size() == bytes_, memory.size(), " bytes for ", bytes_);
  SampleHead head{.digest = {}, .index = name.index, .bytes = bytes_, .record_bytes = record_.size(), .tag = name.tag};
  CopyDigest digest = begin_digest(head, record_);
  std::ranges::copy(record_, memory.begin() + sizeof head);
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    digest.copy(bytes_of(tensor), memory.data() + payload_place_ + entries_[tensor].offset);
  }
  head.digest = digest.value();
  std::memcpy(memory.data(), &head, sizeof head);
}

bool StorableSample::is_same(const StorableSample& other) const {
  if (record_ != other.record_) return false;
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor)
    if (!std::ranges::equal(bytes_of(tensor), other.bytes_of(tensor))) return false;
  return true;
}

std::optional<StoredSample> read_sample(const SampleName& name, std::span<const std::byte> bytes) {
  SampleHead head{};
  if (bytes.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.index != name.index || head.tag != name.tag || head.bytes != bytes.size() ||
      head.record_bytes > bytes.size() - sizeof head)
    return std::nullopt;
  const uint64_t payload_place = align_up(sizeof head + head.record_bytes, wire::kPayloadAlignment);
  if (payload_place > bytes.size()) return std::nullopt;
  const auto record = bytes.subspan(sizeof head, head.record_bytes);
  StoredSample sample{.record = {record.begin(), record.end()}, .frame = {}, .tensors = {}};
  CopyDigest digest = begin_digest(head, sample.record);
  auto frame = wire::parse_frame(sample.record);
  if (!frame || frame.value().payload_bytes != bytes.size() - payload_place) return std::nullopt;
  sample.frame = std::move(frame).value();
  for (const wire::TensorEntry& entry : sample.frame.tensors) {
    if (entry.encoding != wire::Encoding::kPlain) return std::nullopt;
    at::Tensor tensor = at::empty_strided(entry.shape, entry.strides, static_cast<at::ScalarType>(entry.dtype));
    digest.copy(bytes.subspan(payload_place + entry.offset, entry.bytes),
                static_cast<std::byte*>(tensor.mutable_data_ptr()));
    sample.tensors.push_back(std::move(tensor));
  }
  const auto tensor_count = static_cast<uint32_t>(sample.tensors.size());
  if (digest.value() != head.digest || !wire::check_nest(sample.frame.nest, tensor_count, /*allow_pickle=*/true))
    return std::nullopt;
  return sample;
}

}  // namespace penstock::worker
