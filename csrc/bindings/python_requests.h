// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a request in their Python form.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "wire/blob_record.h"
#include "wire/message.h"

namespace penstock::bindings {

// Returns a blob id from its Python form, bytes. ValueError if the length differs from an id's length.
inline wire::BlobId blob_id(const std::string& bytes) {
  wire::BlobId id;
  if (bytes.size() != id.size()) throw pybind11::value_error("a blob id must be 32 bytes, the SHA-256 of the blob");
  std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

// Returns the indices of a request: an int, a list of int, or the bytes of a pickle; None for a request without
// indices. wire::parse_to_job() has checked that the length of `body` matches its kind.
pybind11::object indices_to_python(wire::IndexKind kind, std::span<const std::byte> body);

}  // namespace penstock::bindings
