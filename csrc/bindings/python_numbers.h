// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers in samples, Python's and numpy's scalars, and the dtypes that torch's default_collate gives to columns of
// them.

#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "worker/stack.h"

namespace penstock::bindings {

// One type of numbers. A column is of this kind if the type of each of its numbers is exactly this type.
struct NumberKind {
  enum class Read { kFloat, kInteger, kTruth };

  PyTypeObject* type;
  at::ScalarType dtype;
  Read read;
};

// Confined to one call, under the interpreter lock.
class NumberKinds {
 public:
  // No value for other objects: instances of subclasses, and numpy's other scalars, too.
  std::optional<NumberKind> find(PyObject* object);

 private:
  std::vector<NumberKind> of_numpy_;  // looked up at the first numpy object
};

// Extracts the number from an object. Returns false if the object has another type, or is an integer of more than 64
// bits. Runs no user-defined code.
bool read_number(const NumberKind& kind, PyObject* object, worker::Number& number);

}  // namespace penstock::bindings
