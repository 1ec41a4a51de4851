// SPDX-License-Identifier: Apache-2.0
#include "api/blob_id.h"

#include <algorithm>

#include "graph/sha256.h"

namespace penstock::api {

wire::BlobId blob_id_of(std::span<const std::byte> bytes) {
  graph::Sha256 hash;
  hash.update(bytes);
  const auto digest = hash.finish();
  wire::BlobId id{};
  std::transform(digest.begin(), digest.end(), id.begin(), [](uint8_t byte) { return std::byte{byte}; });
  return id;
}

}  // namespace penstock::api
