// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether plain Python data has changed: a digest of exact lists, tuples, dicts, sets, numbers, text, bytes, tensors
// and arrays, whatever their size. Objects are read without counting references to them, since a forked worker that
// writes to an object's count copies the page that it shares with the trainer.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>

#include "base/content_digest.h"
#include "worker/process_memory.h"

namespace penstock::bindings {

// Confined to the thread that holds the interpreter lock; no Python code of the user's runs in its calls.
class PlainContent {
 public:
  // Time is estimated, not measured, so that the same data always has the same outcome.
  explicit PlainContent(double cost_s_max);

  // Nothing when `value` contains an object that is not plain, which the caller has to look into, or when is_opaque().
  // The digest of a list, tuple, dict or array of a subclass covers the content of the base class.
  std::optional<ContentDigest::Value> digest(pybind11::handle value);

  // Charges work that was done elsewhere.
  void spend(double cost_s);

  // Whether something was met whose changes cannot be seen: memory to which another process may write, tensors that are
  // not in this process's memory, or more than may be looked at in the time.
  bool is_opaque() const { return is_opaque_; }

 private:
  // Each returns false when there is no digest of the whole.
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
  std::optional<worker::ProcessMemory> memory_;  // read when it is first needed
  ContentDigest digest_;
  double cost_left_s_;
  bool is_opaque_ = false;
};

}  // namespace penstock::bindings
