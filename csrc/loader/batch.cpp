// SPDX-License-Identifier: Apache-2.0
#include "loader/batch.h"

#include <utility>

#include "wire/frame.h"

namespace penstock::loader {

Result<std::unique_ptr<Batch>> Batch::from_slab(const wire::BatchFacts& facts, c10::intrusive_ptr<SlabLease> lease,
                                                bool allow_pickle) {
  const uint64_t slab_bytes = lease->view().slab_bytes();
  if (facts.record_offset > slab_bytes || facts.record_bytes > slab_bytes - facts.record_offset) {
    return Fault{Errc::kMalformed,
                 "a batch names a record outside its slab; trainer and workers must run the "
                 "same version of penstock"};
  }
  // Copied before it is checked: the worker can still write to the slab.
  const std::byte* const begin = lease->data() + facts.record_offset;
  std::vector<std::byte> record(begin, begin + facts.record_bytes);
  auto batch = std::make_unique<Batch>(facts);
  if (auto read = batch->record_.read(std::move(record), facts.record_offset, allow_pickle); !read) return read.error();
  // Without a payload the record was all, and it is copied.
  if (batch->record_.frame().payload_bytes > 0) batch->tensors_.set_lease(std::move(lease));
  return batch;
}

Result<std::unique_ptr<Batch>> Batch::from_parts(const wire::BatchFacts& facts, std::vector<std::byte> record,
                                                 std::vector<std::byte> payload, bool allow_pickle) {
  auto batch = std::make_unique<Batch>(facts);
  if (auto read = batch->record_.read(std::move(record), payload.size(), allow_pickle); !read) return read.error();
  batch->tensors_.set_payload(std::move(payload));
  return batch;
}

std::unique_ptr<Batch> Batch::from_tensors(const wire::BatchFacts& facts, LocalTensors content) {
  std::vector<wire::TensorEntry> entries;
  entries.reserve(content.tensors.size());
  for (const at::Tensor& tensor : content.tensors) {
    entries.push_back({.dtype = static_cast<wire::DTypeCode>(tensor.scalar_type()),
                       .bytes = tensor.nbytes(),
                       .shape = tensor.sizes().vec(),
                       .strides = tensor.strides().vec()});
  }
  auto batch = std::make_unique<Batch>(facts);
  batch->record_.describe(std::move(entries), std::move(content.boundary_keys), std::move(content.nest));
  batch->tensors_.set_made(std::move(content.tensors));
  return batch;
}

std::unique_ptr<Batch> Batch::from_error(const wire::BatchFacts& facts, BatchRecord::RemoteError error) {
  auto batch = std::make_unique<Batch>(facts);
  batch->record_.set_remote_error(std::move(error));
  return batch;
}

}  // namespace penstock::loader
