// SPDX-License-Identifier: Apache-2.0
#include "loader/kind_comparison.h"

namespace penstock::loader {

std::optional<std::string> KindComparison::finish(uint64_t worker_id, const std::string& place,
                                                  const ContentDigest::Value& content) {
  const Asked asked = *std::exchange(asked_, std::nullopt);
  const auto kind = kinds_.find(worker_id);
  const FamilySet families = kind == kinds_.end() ? 0 : differing_families(asked.kind, kind->second);
  if (families == 0) return std::nullopt;  // its maker is of the same kind: another batch is compared
  compared_.insert(pair_of(asked.kind, kind->second));
  if (asked.content == content) return std::nullopt;
  const wire::BatchKey batch{.epoch = asked.key.epoch, .sequence = wire::number_of(asked.key)};
  return "workers " + asked.place + " and " + place + " made " + wire::to_text(batch) +
         " with different values. Their kernels give other last bits for " + spoken_families(families) +
         ", and the dataset computes with these, or it gives other samples for the same indices and seeds: the "
         "training depends on who makes which batch. Use workers with the same kind of CPU and the same libraries, or "
         "compute in the model what differs";
}

}  // namespace penstock::loader
