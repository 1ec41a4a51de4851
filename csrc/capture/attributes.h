// SPDX-License-Identifier: Apache-2.0
#pragma once
// The module attributes that were read together with a program. Values computed from them while reading are valid as
// long as the attributes do not change.

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace penstock::capture {

// Whether two values are the same: the same tensors, modules and objects, equal numbers and strings, element by
// element.
bool is_same_value(const c10::IValue& a, const c10::IValue& b);

class ReadAttributes {
 public:
  // Reads the attribute `name` of `owner`, a module.
  c10::IValue read(const c10::IValue& owner, const std::string& name);

  // Whether all attributes still have the values that were read.
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
