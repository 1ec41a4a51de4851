// SPDX-License-Identifier: Apache-2.0
#pragma once
// torch's default_collate for C++ datasets (Collator). It writes the batch in Memory, row by row, and copies a row of a
// large batch past the caches.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "penstock/value.h"

namespace penstock::dataset {

// Where the tensors of a batch are allocated: in the slab of a worker process, or in memory that a trainer's threads
// reuse.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  // Returns a contiguous, uninitialised tensor. Throws c10::Error if the system has no memory.
  virtual at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
};

// Computes torch's default_collate over the samples of one batch, as they are read: a tensor is copied into its row of
// the batch before the next sample is read, while it is in the caches.
//
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

// memcpy for large data that is not read again here. Its stores bypass the caches, so no line is read from memory only
// to be overwritten, which is a third of the traffic of a plain copy, and the caches keep their content. A thread that
// sees a later store of this thread sees the bytes too. Plain memcpy if the processor has no such stores.
void copy_bypassing_caches(void* target, const void* source, size_t bytes);

using CopyBytes = void (*)(void* target, const void* source, size_t bytes);

// Returns how to copy rows of `row_bytes` into a batch of `count` of them: past the caches if the batch is too large to
// still be cached when it is read.
CopyBytes copy_of_rows(size_t count, size_t row_bytes);

// Sets batch[place] = row, for a contiguous batch, and a row of its dtype and its rows' shape.
void copy_row(const at::Tensor& batch, size_t place, const at::Tensor& row);

}  // namespace penstock::dataset
