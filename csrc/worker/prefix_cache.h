// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prefixes and the lazy-fetch lists of a pool worker, by the ids of their blobs. Each request names the ones that
// its batch is made with, so a batch is made with the same ones regardless of worker and time.

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
  // `message` is the body of a prefix request, or a shipment. If it cannot be used here, that is remembered.
  void put(const wire::BlobId& id, std::span<const std::byte> message);

  // Makes `stage` run the available prefixes among `ids`, and no others. The prefixes of the last two different lists
  // are kept: while a new plan replaces an old one, requests of both alternate.
  void select(std::span<const wire::BlobId> ids, PrefixStage& stage);
  // The shipment among the selected ids, if any. Valid until the next call of select().
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
