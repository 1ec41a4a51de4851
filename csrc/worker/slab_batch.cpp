// SPDX-License-Identifier: Apache-2.0
#include "worker/slab_batch.h"

#include <utility>

#include "base/assert.h"
#include "base/bytes.h"

namespace penstock::worker {

SlabBatch::SlabBatch(SealedBatch batch) : batch_(std::move(batch)) {
  if (batch_.region) {
    hold({batch_.region->data(), batch_.record_offset + batch_.record_bytes}, batch_.record_bytes);
    return;
  }
  // Without a slab the record follows in the same buffer.
  batch_.payload.resize(align_up(batch_.payload.size(), wire::kPayloadAlignment));
  batch_.payload.insert(batch_.payload.end(), batch_.record.begin(), batch_.record.end());
  hold(batch_.payload, batch_.record_bytes);
}

void SlabBatch::note_handed_over() {
  PENSTOCK_ASSERT(batch_.region && !is_handed_over_, "a slab can be sent only once");
  batch_.region->arena->pin(batch_.region->slab_index);
  is_handed_over_ = true;
}

SlabBatch::~SlabBatch() {
  if (!batch_.region) return;
  if (is_handed_over_) {
    batch_.region->arena->unpin(batch_.region->slab_index);
  } else {
    batch_.region->arena->cancel(batch_.region->slab_index);
  }
}

}  // namespace penstock::worker
