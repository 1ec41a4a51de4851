// SPDX-License-Identifier: Apache-2.0
#pragma once
// One of the stages that a batch passes between its arrival and the trainer (stage_chain.h): it copies the batch to
// pinned memory (pin_stage.h), or to a device (copy_stage.h).

#include <cstddef>

#include "base/result.h"
#include "base/waker.h"
#include "loader/batch.h"

namespace penstock::loader {

// finish() is for the trainer's thread, takes_narrow() for any, the rest for the chain's.
class BatchStage {
 public:
  BatchStage() = default;
  BatchStage(const BatchStage&) = delete;
  BatchStage& operator=(const BatchStage&) = delete;
  virtual ~BatchStage() = default;

  // On return the batch has its final tensors, though a device may still be filling them. kNoMemory leaves the batch
  // unchanged, for another attempt. After any other error the batch must be dropped, which releases no memory that is
  // still being read.
  virtual Result<void> begin(Batch& batch) = 0;

  // Called just before the trainer receives the batch: its operations on the tensors run after their copy from now on.
  virtual Result<void> finish(Batch& batch) = 0;

  // Whether begin() accepts batches with tensors that were kept narrow (Batch::try_keep_narrow).
  virtual bool takes_narrow() const = 0;

  // Releases the memory that finished copies have read. Returns the number of copies that are still running.
  virtual size_t reclaim() = 0;

  // Called before the first batch: `waker` wakes the chain's thread for a reclaim() until the stage is destroyed.
  virtual void set_waker(Waker&) {}
};

}  // namespace penstock::loader
