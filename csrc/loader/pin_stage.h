// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stage behind pin_memory=True. It copies into torch's pinned host memory, so that `x.cuda(non_blocking=True)` is
// protected by torch's own events. The copy is one memcpy on the chain's thread, where torch uses a Python thread.

#include "loader/batch_stage.h"

namespace penstock::loader {

class PinStage final : public BatchStage {
 public:
  Result<void> begin(Batch& batch) override;
  Result<void> finish(Batch&) override { return {}; }
  bool takes_narrow() const override { return false; }
  size_t reclaim() override { return 0; }
};

}  // namespace penstock::loader
