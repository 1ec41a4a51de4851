// SPDX-License-Identifier: Apache-2.0
#include "pool_client/kind_comparison.h"

namespace penstock::pool_client {

std::optional<std::string> KindComparison::finish(uint64_t worker_id, const std::string& place,
                                                  const ContentDigest::Value& content) {
  const PendingComparison pending = *std::exchange(pending_, std::nullopt);
  const auto kind = kinds_.find(worker_id);
  const FamilySet families = kind == kinds_.end() ? 0 : differing_families(pending.kind, kind->second);
  if (families == 0) return std::nullopt;  // its maker is of the same kind: another batch is compared
  compared_.insert(pair_of(pending.kind, kind->second));
  if (pending.content == content) return std::nullopt;
  const wire::BatchKey batch{.epoch = pending.key.epoch, .sequence = wire::number_of(pending.key)};
  return "workers " + pending.place + " and " + place + " made " + wire::to_text(batch) +
         " with different values. Their kernels return different last bits for " + spoken_families(families) +
         ", and the dataset uses them, or it returns different samples for the same indices and seeds: training "
         "depends on which worker makes which batch. Use workers with the same kind of CPU and the same libraries, or "
         "move the differing computations to the model";
}

}  // namespace penstock::pool_client
