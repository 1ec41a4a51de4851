// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prefixes that a worker of a pool has, by their blobs' ids. Each request names those that its batch is made with,
// so that a batch is made with the same ones wherever and whenever that is.

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "wire/blob_record.h"
#include "worker/prefix_stage.h"

namespace penstock::worker {

// Confined to the thread that serves requests.
class PrefixCache {
 public:
  bool has(const wire::BlobId& id) const { return prefixes_.contains(id); }
  // `message` is the body of a prefix request. One that cannot be run here is remembered as such.
  void put(const wire::BlobId& id, std::span<const std::byte> message) { prefixes_[id] = load_prefix(message); }

  // Has `stage` run those of `ids` that are here, and no others. Those of the last two different lists are kept: while
  // a plan takes another's place, requests of both take turns.
  void select(std::span<const wire::BlobId> ids, PrefixStage& stage);

 private:
  std::map<wire::BlobId, std::shared_ptr<LoadedPrefix>> prefixes_;  // shared with the stage
  std::vector<wire::BlobId> selected_;
  std::vector<wire::BlobId> selected_before_;
};

}  // namespace penstock::worker
