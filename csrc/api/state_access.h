// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "penstock/state.h"
#include "penstock/value.h"

namespace penstock {

// The library's access to the internals of a State.
struct StateAccess {
  static State make(Value value);
  static const Value& value_of(const State& state);
};

}  // namespace penstock
