// SPDX-License-Identifier: Apache-2.0
#pragma once
// The nest of a batch that may not contain pickles, for a trainer that does not trust its workers: tensors, numpy
// arrays and scalars, numbers, text, bytes, None, and dicts, lists, tuples and named tuples of these. Types must match
// exactly, so that the trainer receives the types that were sent: a subclass would arrive as its base class.

#include <pybind11/pybind11.h>

#include <string_view>

#include "bindings/python_nest.h"

namespace penstock::bindings {

// Raises UnsupportedError for any other object, with its position in the whole; `name` is the name of the whole in the
// message. A container that occurs several times is written each time; an array that does becomes one tensor.
EncodedNest encode_plain_nest(pybind11::handle object, std::string_view name);

}  // namespace penstock::bindings
