// SPDX-License-Identifier: Apache-2.0
#pragma once
// The content of a request: all data that a worker needs to make one batch. It is created once, when the trainer sends
// the request, and kept in one place while the request is outstanding: the trainer's thread reads it to name the batch
// that it is waiting for, and the I/O thread sends it again when a worker is lost.

#include <cstddef>
#include <memory>
#include <vector>

#include "wire/batch_facts.h"
#include "wire/blob_record.h"

namespace penstock::session {

struct RequestContent {
  wire::BatchRequest request;
  std::vector<std::byte> indices;  // as specified by request.index_kind
  // The job and the prefixes with which a pool makes the batch. All requests between two changes of these share one
  // list.
  std::shared_ptr<const std::vector<wire::BlobId>> blobs{};
  // The seeds of the epoch's random numbers, which a pool receives with each request; shared in the same way.
  std::shared_ptr<const std::vector<std::byte>> seeds{};
};

using SharedContent = std::shared_ptr<const RequestContent>;

}  // namespace penstock::session
