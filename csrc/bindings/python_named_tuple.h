// SPDX-License-Identifier: Apache-2.0
#pragma once
// Named tuples of a class that both sides have, identified by "module:qualified name".

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

namespace penstock::bindings {

// Whether the class of `object` was made by collections.namedtuple or typing.NamedTuple, or is a subclass of one.
bool is_named_tuple(pybind11::handle object);

// The name of field `index`.
std::string field_name(pybind11::handle named_tuple, size_t index);

// The reason why an object that is_named_tuple() cannot be rebuilt from its name and its values; empty if it can.
std::string named_tuple_refusal(pybind11::handle named_tuple);

std::string named_tuple_name(pybind11::handle named_tuple);

// Makes a named tuple without running any code that the name refers to: the class is looked up in the dictionaries of
// modules that this process has imported and of their classes, and only tuple's constructor makes the object. Raises
// UnsupportedError if this process has no such class, or the name refers to something else.
pybind11::object make_named_tuple(std::string_view name, const pybind11::tuple& values);

}  // namespace penstock::bindings
