// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prefixes that a worker of a pool has, and what is left out of batches, by their blobs' ids. Each request names
// those that its batch is made with, so that a batch is made with the same ones wherever and whenever that is.

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "wire/blob_record.h"
#include "wire/shipment.h"
#include "worker/prefix_stage.h"

namespace penstock::worker {

// Confined to the thread that serves requests.
class PrefixCache {
 public:
  bool has(const wire::BlobId& id) const { return entries_.contains(id); }
  // `message` is the body of a prefix request, or a shipment. One that cannot be used here is remembered as such.
  void put(const wire::BlobId& id, std::span<const std::byte> message);

  // Has `stage` run those of `ids` that are here, and no others. Those of the last two different lists are kept: while
  // a plan takes another's place, requests of both take turns.
  void select(std::span<const wire::BlobId> ids, PrefixStage& stage);
  // The shipment among the selected ones, if there is one. Valid until the next call of select().
  const wire::Shipment* shipment() const { return shipment_; }

 private:
  struct Entry {
    std::shared_ptr<LoadedPrefix> prefix;  // shared with the stage
    std::optional<wire::Shipment> shipment;
  };

  std::map<wire::BlobId, Entry> entries_;
  const wire::Shipment* shipment_ = nullptr;
  std::vector<wire::BlobId> selected_;
  std::vector<wire::BlobId> selected_before_;
};

}  // namespace penstock::worker
