// SPDX-License-Identifier: Apache-2.0
#pragma once
// Named tuples of a class that both sides have, under the name "module:qualified name".

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

namespace penstock::bindings {

// Whether `object` is of a class that collections.namedtuple or typing.NamedTuple made, or of a subclass of one.
bool is_named_tuple(pybind11::handle object);

// The name of the field that is `index`.
std::string field_name(pybind11::handle named_tuple, size_t index);

// Why an object that is_named_tuple() cannot be made again of its name and its values; empty when it can.
std::string named_tuple_refusal(pybind11::handle named_tuple);

std::string named_tuple_name(pybind11::handle named_tuple);

// Makes a named tuple without calling anything that the name names: its class is looked up where modules and classes
// keep their names, among the modules that this process has imported, and tuple alone makes the object. Raises
// UnsupportedError when there is no such class here, or it is something else.
pybind11::object make_named_tuple(std::string_view name, const pybind11::tuple& values);

}  // namespace penstock::bindings
