// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "wire/blob_record.h"

namespace penstock::api {

// The id of the blob with these bytes: their SHA-256 (PROTOCOL.md, "Blob message").
wire::BlobId blob_id_of(std::span<const std::byte> bytes);

}  // namespace penstock::api
