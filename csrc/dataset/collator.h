// SPDX-License-Identifier: Apache-2.0
#pragma once
// Computes torch's default_collate over the samples of one batch, as they are read: a tensor is copied into its row of
// the batch before the next sample is read, while it is in the caches.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "dataset/memory.h"
#include "penstock/value.h"

namespace penstock::dataset {

// Confined to the thread that reads samples. Throws penstock::Error of kind kValue for samples that cannot form a
// batch, with torch's text if torch has the error.
class Collator {
 public:
  // For a batch of at most `capacity` samples.
  Collator(Memory& memory, size_t capacity) : memory_(memory), capacity_(capacity) {}

  void add(const Value& sample);
  size_t count() const { return count_; }
  // Returns the batch of the samples so far, at least one.
  Value finish();

  // A part of a sample, as named in messages.
  struct Path {
    const Path* parent = nullptr;
    const Value* key = nullptr;  // of a dict; else the part has an index
    size_t index = 0;
  };

 private:
  // One part of the samples, of the same kind as in the first sample.
  struct Column {
    Value::Kind kind = Value::Kind::kNone;
    at::Tensor rows;            // of a tensor or a number
    void* data = nullptr;       // of the rows
    Value::Items items{};       // of text and bytes, which are not changed
    std::vector<Value> keys{};  // of a dict
    std::vector<Column> parts{};
  };

  Column begin(const Value& first, const Path& path);
  void add_row(Column& column, const Value& part, const Path& path);
  void copy_tensor(const Column& column, const at::Tensor& row, const Path& path) const;
  Value finish_column(Column& column) const;
  at::Tensor exact(const at::Tensor& rows) const;

  Memory& memory_;
  size_t capacity_;
  size_t count_ = 0;
  std::optional<Column> root_;
};

}  // namespace penstock::dataset
