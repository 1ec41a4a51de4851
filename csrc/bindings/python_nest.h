// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversion between a Python batch and its nest (wire/nest.h). Only this code, python_collate, plain_nest and
// python_content walk Python objects. Exact dicts, lists, tuples, text, numbers, None and plain tensors become tokens;
// any other object, or a container that occurs twice, makes the whole batch one pickle, whose tensors are still sent in
// the table.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <span>
#include <vector>

#include "wire/nest.h"

namespace penstock::bindings {

struct EncodedNest {
  wire::NestWriter nest;
  std::vector<at::Tensor> tensors;  // in table order, each once
};

// `dumps(object)` returns (bytes, list of tensors); it is called only for objects that have no token.
EncodedNest encode_nest(pybind11::handle object, const pybind11::object& dumps);

// `nest` has passed check_nest with this number of tensors. `loads(bytes, list of tensors)` is called for a pickle;
// None if the check accepts no pickles. Raises PenstockError for damage that the check cannot detect.
pybind11::object decode_nest(std::span<const std::byte> nest, const std::vector<at::Tensor>& tensors,
                             const pybind11::object& loads);

// Whether `object` is exactly a torch.Tensor, no subclass and no Parameter.
bool is_exact_tensor(PyObject* object);

// The Python object of a tensor; the existing one if there is one.
pybind11::object wrap_tensor(const at::Tensor& tensor);

}  // namespace penstock::bindings
