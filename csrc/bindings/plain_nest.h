// SPDX-License-Identifier: Apache-2.0
#pragma once
// The nest of a batch that may hold no pickle, for a trainer that does not trust its workers: tensors, numpy's arrays
// and scalars, numbers, text, bytes, None, and dicts, lists, tuples and named tuples of them. Types must match exactly,
// so that the trainer gets the types that were sent: a subclass would come back as its base.

#include <pybind11/pybind11.h>

#include <string_view>

#include "bindings/python_nest.h"

namespace penstock::bindings {

// Raises UnsupportedError for anything else, saying where in the object it lies; `name` is the object's name in the
// message. A container that stands in several places is written at each of them; an array that does is one tensor.
EncodedNest encode_plain_nest(pybind11::handle object, std::string_view name);

}  // namespace penstock::bindings
