// SPDX-License-Identifier: Apache-2.0
#pragma once
// TorchScript's types without the Optional around them.

#include <ATen/core/jit_type.h>

namespace penstock::capture {

inline c10::TypePtr without_optional(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType ? type->containedType(0) : type;
}

}  // namespace penstock::capture
