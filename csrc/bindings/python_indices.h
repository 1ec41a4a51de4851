// SPDX-License-Identifier: Apache-2.0
#pragma once
// The Python form of the indices of a request.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>

#include "wire/batch_facts.h"

namespace penstock::bindings {

// An int, a list of int, or the bytes of a pickle; None for a request without indices. wire::parse_to_job() has checked
// that the length of `body` matches its kind.
pybind11::object indices_to_python(wire::IndexKind kind, std::span<const std::byte> body);

}  // namespace penstock::bindings
