// SPDX-License-Identifier: Apache-2.0
#pragma once
// The Python form of a blob id: bytes.

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

#include "wire/blob_record.h"

namespace penstock::bindings {

// ValueError if the length differs from an id's length.
inline wire::BlobId blob_id(const std::string& bytes) {
  wire::BlobId id;
  if (bytes.size() != id.size()) throw pybind11::value_error("a blob id must be 32 bytes, the SHA-256 of the blob");
  std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

}  // namespace penstock::bindings
