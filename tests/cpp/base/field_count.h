// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many fields a record has, so that a table with a case for each of them stops compiling when one is added.

#include <cstddef>

namespace penstock::test {

struct AnyValue {
  template <typename T>
  operator T() const;  // NOLINT(google-explicit-constructor): it stands for every value
};

template <typename Record, typename... Values>
constexpr size_t field_count() {
  if constexpr (requires { Record{Values{}..., AnyValue{}}; }) {
    return field_count<Record, Values..., AnyValue>();
  } else {
    return sizeof...(Values);
  }
}

}  // namespace penstock::test
