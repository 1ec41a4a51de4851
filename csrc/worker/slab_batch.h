// SPDX-License-Identifier: Apache-2.0
#pragma once
// A batch made by this process, in the slab in which it was sealed.

#include "server/pool_work.h"
#include "shm/slab_pool.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// Thread-compatible.
class SlabBatch final : public server::HeldBatch {
 public:
  explicit SlabBatch(SealedBatch batch);
  ~SlabBatch() override;

  // Null if no shared memory was available.
  const shm::SlabRegion* region() const override { return batch_.region ? &*batch_.region : nullptr; }
  void note_handed_over() override;
  bool is_handed_over() const override { return is_handed_over_; }

 private:
  SealedBatch batch_;
  bool is_handed_over_ = false;
};

}  // namespace penstock::worker
