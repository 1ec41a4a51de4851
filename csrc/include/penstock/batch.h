// SPDX-License-Identifier: Apache-2.0
#pragma once
// A batch as the loader gives it.

#include <ATen/core/Tensor.h>

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

// A value type: copies share the tensors. The memory of the tensors goes back to the loader's workers when the last
// tensor on it dies; a program that keeps many batches is given copies of later ones.
//
//   batch["image"]                  a tensor by its name, in a batch that is a dict
//   batch[0]                        a tensor by its place, in a batch that is a list or a tuple
//   batch.as<Sample>()              the whole as a struct (PENSTOCK_FIELDS), a tuple, a vector ...
//   batch.value()["meta"]["id"]     a part of any kind
//
// With a pool and a module that is offloaded, a tensor that nobody has read in earlier batches may stay with its
// worker. It comes when it is read, which blocks. as() and value() read all. Such a read is for the thread that the
// loader gave the batch to, while the loader lives: it throws kUnsupported or kClosed otherwise.
class PENSTOCK_API Batch {
 public:
  Batch() = default;
  Batch(Value value, int64_t number) : value_(std::move(value)), number_(number) {}

  // Throws kValue, naming what the batch has, where the part is missing or no tensor.
  const at::Tensor& operator[](std::string_view name) const;
  const at::Tensor& operator[](size_t position) const;
  const at::Tensor& operator[](int position) const { return (*this)[static_cast<size_t>(position)]; }
  // The only tensor of a batch that is one.
  const at::Tensor& tensor() const { return value().tensor(); }

  // The batch as a T; see fields.h for what T may be. Throws kValue where it does not fit.
  template <typename T>
  T as() const {
    return Conversion<T>::from_value(value(), "batch");
  }

  const Value& value() const { return origin_ ? read() : value_; }
  // The number of the batch in its epoch, from 0.
  int64_t number() const { return number_; }

 private:
  friend struct BatchAccess;

  const Value& read() const;

  Value value_;
  int64_t number_ = 0;
  std::shared_ptr<BatchOrigin> origin_;  // shared by copies: by which an offloaded module knows the batch
};

}  // namespace penstock
