// SPDX-License-Identifier: Apache-2.0
#pragma once
// Detects changes to plain Python data: a digest of exact lists, tuples, dicts, sets, numbers, text, bytes, tensors and
// arrays of any size. Objects are read without touching their reference counts, since a forked worker that writes to a
// count copies the page that it shares with the trainer.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "worker/process_memory.h"

namespace penstock::bindings {

// Confined to the thread that holds the interpreter lock; its calls run no user-defined Python code.
class PlainContent {
 public:
  // Time is estimated, not measured, so that the same data always gives the same outcome.
  explicit PlainContent(double cost_s_max);

  // No value if `value` contains an object that is not plain, which the caller must examine, or if is_opaque(). The
  // digest of a list, tuple, dict or array of a subclass covers the content of the base class.
  std::optional<ContentDigest::Value> digest(pybind11::handle value);

  // Adds the cost of work done elsewhere.
  void spend(double cost_s);

  // Whether an object was found whose changes cannot be detected: memory that another process may write to, tensors
  // that are not in this process's memory, or more data than the cost limit allows.
  bool is_opaque() const { return is_opaque_; }

 private:
  // Each returns false if the whole has no digest.
  bool take(PyObject* object, uint32_t depth);
  bool take_number(PyObject* object);
  bool take_text(PyObject* object);
  bool take_container(PyObject* object, uint32_t depth);
  bool take_set(PyObject* object, uint32_t depth);
  bool take_tensor(PyObject* object, uint32_t depth);
  bool take_array(PyObject* object);
  bool take_array_scalar(PyObject* object);
  bool take_memory(std::span<const std::byte> memory);
  bool take_bytes(std::span<const std::byte> bytes);
  bool refuse();
  bool is_type(PyObject* object, const pybind11::object& type) const;

  pybind11::object array_type_, array_scalar_type_, parameter_type_;
  std::optional<worker::ProcessMemory> memory_;  // read on first use
  ContentDigest digest_;
  double cost_left_s_;
  bool is_opaque_ = false;
};

}  // namespace penstock::bindings
