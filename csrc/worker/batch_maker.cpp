// SPDX-License-Identifier: Apache-2.0
#include "worker/batch_maker.h"

#include <utility>

#include "worker/sharing.h"
#include "worker/withholding.h"

namespace penstock::worker {

Result<MadeBatch> BatchMaker::make(BatchContent& content, const BatchPlace& place) {
  const auto began_at = std::chrono::steady_clock::now();
  const bool is_compiled = prefixes_.run(content, place.epoch_seed, place.sequence);
  if (place.shipment != nullptr) content.withheld = leaves_to_withhold(*place.shipment, content, place.sequence);
  if (place.link_bytes_per_s > 0) content.forms = narrowing_.forms_of(content, place.link_bytes_per_s);
  if (shares_leaves_) content.shared = leaves_to_share(content);
  auto made = make_plain(content);
  if (!made) return made;
  made.value().is_compiled = is_compiled;
  // A fetched batch is usually in the slab already, so sealing copies only the boundary tensors.
  if (!content.boundary_keys.empty()) made.value().on_prefix = std::chrono::steady_clock::now() - began_at;
  return made;
}

Result<MadeBatch> BatchMaker::make_plain(const BatchContent& content) {
  auto sealed = writer_.seal(content);
  if (!sealed) return sealed.error();
  return MadeBatch{.sealed = std::move(sealed).value()};
}

}  // namespace penstock::worker
