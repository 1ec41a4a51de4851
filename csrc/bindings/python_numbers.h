// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers in samples, those of Python and the scalars of numpy, and the dtypes that torch's default_collate gives
// columns of them.

#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "worker/stack.h"

namespace penstock::bindings {

// One type of numbers. A column is of this kind if the type of each of its numbers is exactly this one.
struct NumberKind {
  enum class Read { kFloat, kInteger, kTruth };

  PyTypeObject* type;
  at::ScalarType dtype;
  Read read;
};

// Confined to one call, under the interpreter's lock.
class NumberKinds {
 public:
  // Nothing for what is no such number: children of these types, numpy's other scalars, everything else.
  std::optional<NumberKind> find(PyObject* object);

 private:
  std::vector<NumberKind> of_numpy_;  // looked up at the first object that is numpy's
};

// Takes the number out of an object. False where it is of another type, or an integer that has more than 64 bits. Runs
// no code of the user's.
bool read_number(const NumberKind& kind, PyObject* object, worker::Number& number);

}  // namespace penstock::bindings
