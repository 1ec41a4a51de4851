// SPDX-License-Identifier: Apache-2.0
#pragma once
// A sample as the bytes that a cache keeps: a head, a batch record (wire/frame.h) with the sample's nest, and its
// tensors, which a reader copies into new tensors with the same dtypes, shapes and strides. The head has a digest, and
// bytes that do not match it are not a sample.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "wire/frame.h"

namespace penstock::worker {

// The key of a stored sample. Bytes of another name are not read.
struct SampleName {
  uint64_t index = 0;
  uint64_t tag = 0;  // what else must agree: it differs if the sample's source has changed
};

// A sample that can be written. Thread-compatible.
class StorableSample {
 public:
  // `tensors` are plain and referred to by the nest. They must not change while this object is in use.
  StorableSample(std::span<const std::byte> nest, std::vector<at::Tensor> tensors);

  uint64_t bytes() const { return bytes_; }
  // `memory` has bytes() bytes.
  void write(const SampleName& name, std::span<std::byte> memory) const;

  // Whether all bits that would be written are equal.
  bool is_same(const StorableSample& other) const;

 private:
  std::span<const std::byte> bytes_of(size_t tensor) const;

  std::vector<at::Tensor> tensors_;
  std::vector<wire::TensorEntry> entries_;
  std::vector<std::byte> record_;
  uint64_t payload_place_ = 0;
  uint64_t bytes_ = 0;
};

// A sample that was read: copies without other references.
struct StoredSample {
  std::vector<std::byte> record;
  wire::Frame frame;  // views into the record
  std::vector<at::Tensor> tensors;
};

// No value if the bytes are not those that were written under this name. Other processes may write to them meanwhile.
std::optional<StoredSample> read_sample(const SampleName& name, std::span<const std::byte> bytes);

}  // namespace penstock::worker
