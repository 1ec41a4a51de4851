// SPDX-License-Identifier: Apache-2.0
#pragma once
// The content of a request: all that a worker needs to make one batch. It is made once, when the trainer asks, and kept
// in one place for as long as the request is outstanding: the trainer's thread reads it to name the batch that it waits
// for, and the I/O thread sends it again when a worker is lost.

#include <cstddef>
#include <memory>
#include <vector>

#include "wire/batch_facts.h"
#include "wire/blob_record.h"

namespace penstock::cluster {

struct RequestContent {
  wire::BatchRequest request;
  std::vector<std::byte> indices;  // as request.index_kind says
  // The job and the prefixes that a pool makes the batch with. All requests between two changes of these share one
  // list.
  std::shared_ptr<const std::vector<wire::BlobId>> blobs{};
  // Those of the epoch's random numbers, which a pool is told with each request; shared in the same way.
  std::shared_ptr<const std::vector<std::byte>> seeds{};
};

using SharedContent = std::shared_ptr<const RequestContent>;

}  // namespace penstock::cluster
