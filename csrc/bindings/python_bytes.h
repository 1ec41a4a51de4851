// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>
#include <string_view>

namespace penstock::bindings {

// The bytes of an object, valid while it lives.
inline std::span<const std::byte> bytes_of(const pybind11::bytes& object) {
  const auto view = static_cast<std::string_view>(object);
  return std::as_bytes(std::span(view.data(), view.size()));
}

}  // namespace penstock::bindings
