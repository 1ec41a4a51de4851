// SPDX-License-Identifier: Apache-2.0
#include "capture/attributes.h"

#include <ATen/core/List.h>

#include <algorithm>

namespace penstock::capture {
namespace {

c10::IValue snapshot(const c10::IValue& value) {
  if (!value.isList()) return value;
  c10::List<c10::IValue> copy = value.toList().copy();
  for (size_t i = 0; i < copy.size(); ++i) copy.set(i, snapshot(copy.get(i)));
  return copy;
}

bool are_same(c10::ArrayRef<c10::IValue> a, c10::ArrayRef<c10::IValue> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), is_same_value);
}

}  // namespace

bool is_same_value(const c10::IValue& a, const c10::IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (a.isTensor()) return a.toTensor().is_same(b.toTensor());
  if (a.isList()) return are_same(a.toList().vec(), b.toList().vec());
  if (a.isTuple()) return are_same(a.toTupleRef().elements().vec(), b.toTupleRef().elements().vec());
  if (a.isDouble()) return std::bit_cast<uint64_t>(a.toDouble()) == std::bit_cast<uint64_t>(b.toDouble());
  if (a.isInt() || a.isBool() || a.isString() || a.isNone() || a.isDevice() || a.isComplexDouble()) return a == b;
  return a.is(b);
}

c10::IValue ReadAttributes::read(const c10::IValue& owner, const std::string& name) {
  c10::IValue value = owner.toObjectRef().getAttr(name);
  attributes_.push_back({owner, name, snapshot(value)});
  return value;
}

bool ReadAttributes::hold() const {
  return std::all_of(attributes_.begin(), attributes_.end(), [](const Attribute& attribute) {
    return is_same_value(attribute.owner.toObjectRef().getAttr(attribute.name), attribute.value);
  });
}

}  // namespace penstock::capture
