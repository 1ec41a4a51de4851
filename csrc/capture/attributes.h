// SPDX-License-Identifier: Apache-2.0
#pragma once
// The attributes of a module that a program was read with. Values that were computed from them while reading hold for
// as long as the attributes do.

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace penstock::capture {

// Whether two values are one: the same tensors, modules and objects, equal numbers and strings, element by element.
bool is_same_value(const c10::IValue& a, const c10::IValue& b);

class ReadAttributes {
 public:
  // Reads the attribute `name` of `owner`, a module.
  c10::IValue read(const c10::IValue& owner, const std::string& name);

  // Whether each of them has the value that was read.
  bool hold() const;

 private:
  struct Attribute {
    c10::IValue owner;
    std::string name;
    c10::IValue value;  // lists are copies
  };
  std::vector<Attribute> attributes_;
};

}  // namespace penstock::capture
