// SPDX-License-Identifier: Apache-2.0
#include "worker/pool_work.h"

#include "base/bytes.h"

namespace penstock::worker {

HeldBatch::HeldBatch(SealedBatch batch) : batch_(std::move(batch)) {
  if (batch_.region) {
    payload_ = {batch_.region->data(), batch_.record_offset + batch_.record_bytes};
    return;
  }
  // Without a slab the record follows in the same buffer.
  batch_.payload.resize(align_up(batch_.payload.size(), wire::kPayloadAlignment));
  batch_.payload.insert(batch_.payload.end(), batch_.record.begin(), batch_.record.end());
  payload_ = batch_.payload;
}

HeldBatch::~HeldBatch() {
  if (batch_.region) batch_.region->arena->cancel(batch_.region->slab_index);
}

}  // namespace penstock::worker
