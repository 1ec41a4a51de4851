// SPDX-License-Identifier: Apache-2.0
#pragma once
// A batch as the loader delivers it.

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "penstock/export.h"
#include "penstock/fields.h"
#include "penstock/value.h"

namespace penstock {

class BatchOrigin;

namespace api {
struct CommitMark;
}

// The name of a batch in its loader's stream. It is the same after a resume, in C++ and in Python, so that a program
// can save it and pass it to DataLoader::commit() later.
struct BatchId {
  int64_t epoch = 0;  // number of the epoch, from 0, counted by the loader and its states
  int64_t batch = 0;  // place of the batch in the order of that epoch, from 0

  friend auto operator<=>(const BatchId&, const BatchId&) = default;
};

// A value type: copies share the tensors. The memory of the tensors returns to the loader's workers when the last
// tensor that uses it is freed; a program that keeps many batches receives copies of later ones.
//
//   batch["image"]                  a tensor by name, if the batch is a dict
//   batch[0]                        a tensor by position, if the batch is a list or a tuple
//   batch.as<Sample>()              the whole batch as a struct (PENSTOCK_FIELDS), a tuple, a vector ...
//   batch.value()["meta"]["id"]     a part of any kind
//
// With a pool and an offloaded module, a tensor that the program has not read in earlier batches may stay with its
// worker. Reading it fetches it, which blocks; as() and value() read all tensors. Only the thread that received the
// batch may read such a tensor, while the loader exists: the read throws kUnsupported or kClosed otherwise.
class PENSTOCK_API Batch {
 public:
  Batch() = default;
  Batch(Value value, int64_t number) : value_(std::move(value)), number_(number) {}

  // Throws kValue, listing the parts of the batch, if the part is missing or is not a tensor.
  const at::Tensor& operator[](std::string_view name) const;
  const at::Tensor& operator[](size_t position) const;
  const at::Tensor& operator[](int position) const { return (*this)[static_cast<size_t>(position)]; }
  // The tensor of a batch that is a single tensor.
  const at::Tensor& tensor() const { return value().tensor(); }

  // The batch as a T; fields.h lists the types that T may be. Throws kValue if the batch does not fit.
  template <typename T>
  T as() const {
    return Conversion<T>::from_value(value(), "batch");
  }

  const Value& value() const { return origin_ ? read() : value_; }
  // The index of the batch in its epoch, from 0.
  int64_t number() const { return number_; }
  // The batch's name for DataLoader::commit(). Throws kUnsupported for a batch of a loader without Options::commit.
  BatchId id() const;

 private:
  friend struct BatchAccess;

  const Value& read() const;

  Value value_;
  int64_t number_ = 0;
  std::shared_ptr<BatchOrigin> origin_;          // shared by copies; identifies the batch to an offloaded module
  std::shared_ptr<const api::CommitMark> mark_;  // shared by copies; if the loader has Options::commit
};

}  // namespace penstock
