// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversion between a Python batch and its nest (wire/nest.h). Only this code, python_collate, plain_nest and
// python_content walk Python objects. Exact dicts, lists, tuples, text, numbers, None and plain tensors become tokens,
// and so do sparse and nested tensors and objects of classes that penstock.stream.batch_types can take apart; any other
// object, or a container that occurs twice, makes the whole batch one pickle, whose tensors are still sent in the
// table. A named tuple is identified by the name of its class, "module:qualified name", which both sides have.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "wire/nest.h"

namespace penstock::bindings {

// A batch as it is sent: its nest, and the tensors that the nest refers to.
struct EncodedNest {
  wire::NestWriter nest;
  std::vector<at::Tensor> tensors;  // in table order, each once
};

// How objects of other classes are taken apart and made, for all calls in this process. `flatten(object, is_trusted)`
// returns the name of its class and a tuple of its context and its children, or None; `make(name, tuple, is_trusted)`
// returns an object, or raises UnsupportedError. `is_trusted`: whether the receiver trusts the sender.
void set_batch_types(pybind11::object flatten, pybind11::object make);

// An object that flatten() has taken apart.
struct FlatObject {
  std::string name;
  pybind11::tuple values;
};
std::optional<FlatObject> flatten_object(pybind11::handle object, bool is_trusted);

// `dumps(object)` returns (bytes, list of tensors); it is called only for objects that have no token.
EncodedNest encode_nest(pybind11::handle object, const pybind11::object& dumps);

// `nest` has passed check_nest with this number of tensors. `loads(bytes, list of tensors)` is called for a pickle;
// None if the check accepts no pickles. Raises PenstockError for damage that the check cannot detect.
pybind11::object decode_nest(std::span<const std::byte> nest, const std::vector<at::Tensor>& tensors,
                             const pybind11::object& loads);

// Whether a tensor consists of others, as sparse and nested tensors do; it is sent as an object with these as children.
bool has_components(const at::Tensor& tensor);

// Whether `object` is exactly a torch.Tensor, no subclass and no Parameter.
bool is_exact_tensor(PyObject* object);

// The Python object of a tensor; the existing one if there is one.
pybind11::object wrap_tensor(const at::Tensor& tensor);

// Whether the class of `object` was made by collections.namedtuple or typing.NamedTuple, or is a subclass of one.
bool is_named_tuple(pybind11::handle object);

// The name of field `index`.
std::string field_name(pybind11::handle named_tuple, size_t index);

// The reason why an object that is_named_tuple() cannot be rebuilt from its name and its values; empty if it can.
std::string named_tuple_refusal(pybind11::handle named_tuple);

// The name of the class: "module:qualified name".
std::string named_tuple_name(pybind11::handle named_tuple);

// Makes a named tuple without running any code that the name refers to: the class is looked up in the dictionaries of
// modules that this process has imported and of their classes, and only tuple's constructor makes the object. Raises
// UnsupportedError if this process has no such class, or the name refers to something else.
pybind11::object make_named_tuple(std::string_view name, const pybind11::tuple& values);

}  // namespace penstock::bindings
